"""F60: KV moves from fragmented blocks into fragmented blocks about as fast as from one run of
blocks into another, through P's sender, real sockets and D's receiver.

`pd-grpc bench kv` measures the two rates. The defect made one some 300 times the other; what is
bounded here is far from either, so that no other program on the machine matters."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import OpenTransfer
from pd_grpc.prefill.bulk import BulkSender
from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import LayerRun, SendPlan
from pd_grpc.transport.inline import InlineTransport
from pd_grpc.v1 import layout_pb2, transfer_pb2
from tests.decode.wire import RawPrefill, Wire, wire

BLOCK, LAYERS = 16, 8
SENT, POOL = 320, 700
"""Blocks of 96 KiB; a layer of one takes 12 KiB, as with a small model of today."""
TOKENS = SENT * BLOCK
LARGE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_blocks": POOL,
    "sim_layers": LAYERS,
    "sim_heads": 3,
    "sim_head_dim": 128,
    "max_model_len": 2 * TOKENS,
}
ROUNDS, MORE_ROUNDS = 5, 25
"""Of either in turn; on a machine that others use as well, the best of more of them counts."""
AT_LEAST = 0.1


class Sender:
    """The bulk side of a P, over a pool of random bytes."""

    def __init__(self, p: RawPrefill) -> None:
        self._p = p
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[ev.Event] = self._loop.create_future()
        self.layout, self.memory = p.engine.layout, p.engine.memory
        for block in range(self.memory.num_blocks):
            payload = random.Random(block).randbytes(self.layout.block_bytes)
            self.memory.write([block], 0, 0, LAYERS, memoryview(payload))
        config = PrefillConfig()
        transport = InlineTransport(
            self.memory, lambda endpoint: rpc.aio_channel(endpoint, config, config)
        )
        self.bulk = BulkSender(
            self.layout,
            [{layout_pb2.TRANSPORT_INLINE: transport}],
            config.chunk_bytes,
            SystemClock(),
            self._report,
        )
        self.bulk.start()

    async def send(self, d: Wire, blocks: list[int]) -> tuple[float, tuple[int, ...]]:
        """Move `blocks` to D, which is told and then forgets; returns the seconds it took, and the
        blocks they went to."""
        request = d.request()
        grant = await self._p.allocate(request, prompt_tokens=TOKENS)
        holding = d.server.machine.ledger.transfers[grant.grant_id].holding
        assert holding is not None
        there = tuple(holding.blocks)
        message = transfer_pb2.TransferOpen(
            session_id=self._p.welcome.session_id, ref=request.ref, grant_id=grant.grant_id
        )
        plan = SendPlan(TOKENS, tuple(blocks), ((0, SENT),), (LayerRun(0, 0, LAYERS),))
        key = TransferKey(request.transfer_id, 1)
        endpoint = grant.shards[0].endpoint
        self._over = self._loop.create_future()
        began = time.perf_counter()
        self.bulk.open(OpenTransfer(key, 0, "d", endpoint, message, plan, 10.0, 60.0), ())
        for layer in range(LAYERS):
            self.bulk.layer_ready([(key, TOKENS)], 0, layer)
        event = await asyncio.wait_for(self._over, 30)
        took_s = time.perf_counter() - began
        assert isinstance(event, ev.TransferCompleted), event
        sent = self.memory.read(blocks, 0, 0, LAYERS)
        arrived = d.server.engine.memory.read(there[:SENT], 0, 0, LAYERS)
        assert sent == arrived
        await self._p.release(request, cause=Fault(Reason.SUPERSEDED, "that was all"))
        return took_s, there

    def _report(self, event: ev.Event) -> None:
        if isinstance(event, ev.TransferCompleted | ev.TransferBroken):
            self._loop.call_soon_threadsafe(self._over.set_result, event)


@asynccontextmanager
async def sender(p: RawPrefill) -> AsyncIterator[Sender]:
    made = Sender(p)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.bulk.stop)


def arrange(pool: BlockPool, order: list[int]) -> None:
    """Have a pool give out its blocks in this order."""
    holdings = {}
    while pool.free:
        holding = pool.reserve(1, owner="the test")
        holdings[holding.blocks[0]] = holding
    for block in order:
        holdings[block].release()


def runs(blocks: tuple[int, ...]) -> int:
    """How many runs of consecutive blocks there are."""
    return 1 + sum(after != before + 1 for before, after in pairwise(blocks))


async def test_fragmented_blocks_move_no_order_slower_than_contiguous_ones() -> None:
    in_order = list(range(POOL))
    shuffled = random.Random(7).sample(in_order, POOL)
    async with wire(**LARGE) as d:
        p = await d.prefill()
        async with sender(p) as bulk:
            best = {"contiguous": float("inf"), "fragmented": float("inf")}
            rounds = 0
            while rounds < ROUNDS or (
                rounds < MORE_ROUNDS and best["contiguous"] < AT_LEAST * best["fragmented"]
            ):
                rounds += 1
                for name, order in (("contiguous", in_order), ("fragmented", shuffled)):
                    arrange(d.server.pool, order)
                    took_s, there = await bulk.send(d, order[:SENT])
                    assert (runs(there) == 1) == (order is in_order)
                    best[name] = min(best[name], took_s)
        mib = SENT * bulk.layout.block_bytes / (1 << 20)
        told = {name: f"{mib / s:.0f} MiB/s" for name, s in best.items()}
        print(told, f"{rounds} rounds")
        assert best["contiguous"] >= AT_LEAST * best["fragmented"], told
