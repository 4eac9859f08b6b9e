"""Transfers to one shard write in turn, over a transport whose writes end when they are let."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pd_grpc.prefill import events as ev
from pd_grpc.prefill import pair_window
from pd_grpc.prefill.actions import OpenTransfer
from pd_grpc.prefill.bulk import BulkSender
from pd_grpc.prefill.pair_window import TURN_WRITES, WRITES_AT_ONCE
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import (
    LayerRun,
    SendPlan,
    SendStream,
    SendTransport,
    Slab,
    StreamListener,
)
from pd_grpc.v1 import layout_pb2, transfer_pb2
from tests.prefill.world import LAYOUT
from tests.waiting import until

TRANSFERS = WRITES_AT_ONCE + 3
BLOCKS = 2


class Gated(SendTransport):
    """A write takes until `gate` is open, and its slab is acknowledged at once."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.at_once = self.most_at_once = 0
        self.writers: list[GatedStream] = []
        """Who has written, in the order in which the writes began."""

    def open(
        self,
        endpoint: str,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
        timeout_s: float,
        metadata: Sequence[tuple[str, str]],
    ) -> SendStream:
        asyncio.get_running_loop().call_soon(listener.opened, [], 1 << 30)
        return GatedStream(self, listener)

    def forget(self, endpoint: str) -> None:
        pass

    async def stop(self) -> None:
        pass


class GatedStream(SendStream):
    def __init__(self, transport: Gated, listener: StreamListener) -> None:
        self._transport = transport
        self._listener = listener
        self._accepted = 0

    async def write(self, slab: Slab, blocks: Sequence[int]) -> bool:
        gated = self._transport
        gated.writers.append(self)
        gated.at_once += 1
        gated.most_at_once = max(gated.most_at_once, gated.at_once)
        await gated.gate.wait()
        gated.at_once -= 1
        self._accepted += slab.layers * slab.blocks * LAYOUT.layer_bytes(slab.group)
        self._listener.acked([slab], self._accepted)
        return True

    async def end(self, chunks: int, payload_bytes: int) -> bool:
        self._listener.completed()
        return True

    async def finished(self) -> None:
        pass

    async def close(self) -> bool:
        return True


async def test_transfers_to_one_shard_write_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_window, "TURN_S", 3600.0)
    transport = Gated()
    events: list[ev.Event] = []
    layer = LAYOUT.layer_bytes(0)
    transports: dict[int, SendTransport] = {layout_pb2.TRANSPORT_INLINE: transport}
    bulk = BulkSender(LAYOUT, [transports], layer, SystemClock(), events.append)
    bulk.start()
    try:
        tokens = BLOCKS * LAYOUT.block_size
        plan = SendPlan(tokens, (0, 1), ((0, BLOCKS),), (LayerRun(0, 0, 2),), ready=tokens)
        for i in range(TRANSFERS):
            key, message = TransferKey(f"t-{i}", 1), transfer_pb2.TransferOpen(grant_id=f"g-{i}")
            bulk.open(OpenTransfer(key, 0, "d", "d:1", message, plan, 30.0, 30.0), [])
        await until(lambda: transport.at_once == WRITES_AT_ONCE)
        bulk._loop.call_soon_threadsafe(transport.gate.set)
        await until(lambda: sum(isinstance(e, ev.TransferCompleted) for e in events) == TRANSFERS)
        assert transport.most_at_once == WRITES_AT_ONCE
        # Of each a chunk for each layer of a block, which is as much as a turn lasts for.
        assert len(transport.writers) == TRANSFERS * 2 * BLOCKS
        first_turns = transport.writers[: WRITES_AT_ONCE * TURN_WRITES]
        assert len(set(first_turns)) == WRITES_AT_ONCE
    finally:
        await asyncio.to_thread(bulk.stop)
