"""P's bulk thread against a real shard socket: order, reopening, silence, and letting go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import OpenTransfer
from pd_grpc.prefill.bulk import BulkSender
from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import LayerRun, SendPlan
from pd_grpc.transport.inline import InlineTransport
from pd_grpc.v1 import layout_pb2, transfer_pb2, transfer_pb2_grpc
from tests.prefill.world import LAYOUT
from tests.waiting import until

KEY = TransferKey("t-1", 1)
BLOCKS = 4


class Shard(transfer_pb2_grpc.TransferServiceServicer):
    """Verifies what comes, over several streams; `break_after` chunks it drops the stream."""

    def __init__(self) -> None:
        self.verified: list[transfer_pb2.KvChunk] = []
        self.streams = 0
        self.break_after = 1000
        self.acknowledges = True
        self.fault: Fault | None = None

    async def Transfer(self, requests: Any, context: Any) -> None:
        self.streams += 1
        if self.fault is not None:
            await rpc.abort(context, self.fault)
        chunks = accepted = 0
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "open":
                opened = transfer_pb2.TransferOpened(window_bytes=1 << 20)
                opened.verified.extend(_range(chunk) for chunk in self.verified)
                await context.write(transfer_pb2.TransferResponse(opened=opened))
            elif kind == "chunk" and self.acknowledges:
                if chunks == self.break_after:
                    self.break_after = 1000
                    return
                self.verified.append(request.chunk)
                chunks, accepted = chunks + 1, accepted + len(request.chunk.payload)
                ack = transfer_pb2.TransferAck(accepted_bytes=accepted)
                ack.ranges.append(_range(request.chunk))
                await context.write(transfer_pb2.TransferResponse(ack=ack))
            elif kind == "end" and self.acknowledges:
                done = transfer_pb2.TransferCompleted(chunks=chunks, bytes=accepted)
                await context.write(transfer_pb2.TransferResponse(completed=done))
                return


def _range(chunk: transfer_pb2.KvChunk) -> transfer_pb2.KvRange:
    return transfer_pb2.KvRange(
        group=chunk.group,
        layer_start=chunk.layer_start,
        layer_count=chunk.layer_count,
        block_start=chunk.block_start,
        block_count=chunk.block_count,
    )


class Bench:
    """A bulk sender with one block-layer per chunk, a shard, and what was reported."""

    def __init__(self, shard: Shard, port: int) -> None:
        self.shard = shard
        self.endpoint = f"127.0.0.1:{port}"
        self.events: list[ev.Event] = []
        memory = HostKvMemory(bytearray(range(256)) * (8 * LAYOUT.block_bytes // 256), LAYOUT)
        self.bulk = BulkSender(
            LAYOUT,
            [{layout_pb2.TRANSPORT_INLINE: InlineTransport(memory, grpc.aio.insecure_channel)}],
            LAYOUT.layer_bytes(0),
            SystemClock(),
            self.events.append,
        )
        self.bulk.start()

    def open(self, progress_s: float = 5) -> None:
        plan = SendPlan(
            BLOCKS * LAYOUT.block_size, (3, 2, 1, 0), ((0, BLOCKS),), (LayerRun(0, 0, 2),)
        )
        action = OpenTransfer(
            KEY,
            0,
            "d",
            self.endpoint,
            transfer_pb2.TransferOpen(grant_id="g"),
            plan,
            progress_s,
            10,
        )
        self.bulk.open(action, [])

    def compute(self) -> None:
        for layer in range(2):
            self.bulk.layer_ready([(KEY, BLOCKS * LAYOUT.block_size)], 0, layer)

    async def heard(self, kind: type[ev.Event]) -> ev.Event:
        await until(lambda: any(isinstance(event, kind) for event in self.events))
        return next(event for event in self.events if isinstance(event, kind))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    server, shard = grpc.aio.server(), Shard()
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(shard, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = Bench(shard, port)
    yield made
    await asyncio.to_thread(made.bulk.stop)
    await server.stop(0)


async def test_what_the_engine_computes_is_sent_and_completed(bench: Bench) -> None:
    bench.open()
    bench.compute()
    await bench.heard(ev.TransferCompleted)
    order = [(chunk.layer_start, chunk.block_start) for chunk in bench.shard.verified]
    assert order == [(layer, block) for layer in range(2) for block in range(BLOCKS)]
    acks = [event for event in bench.events if isinstance(event, ev.KvAcked)]
    assert acks[-1].acked_bytes == BLOCKS * LAYOUT.block_bytes


async def test_a_stream_opened_again_sends_only_what_the_shard_lacks(bench: Bench) -> None:
    bench.shard.break_after = 3
    bench.open()
    bench.compute()
    broken = await bench.heard(ev.TransferBroken)
    assert isinstance(broken, ev.TransferBroken)
    assert isinstance(broken.fault, TransportFault) and broken.fault.peer_lost
    bench.open()
    await bench.heard(ev.TransferCompleted)
    assert bench.shard.streams == 2
    names = [(chunk.layer_start, chunk.block_start) for chunk in bench.shard.verified]
    assert sorted(names) == [(layer, block) for layer in range(2) for block in range(BLOCKS)]


async def test_a_stream_opened_again_tells_that_its_shard_is_there(bench: Bench) -> None:
    bench.shard.break_after = 0
    bench.open()
    await until(lambda: bench.shard.streams == 1)
    bench.compute()
    await bench.heard(ev.TransferBroken)
    assert bench.events == [each for each in bench.events if isinstance(each, ev.TransferBroken)]
    bench.open()
    await bench.heard(ev.TransferCompleted)
    assert isinstance(bench.events[1], ev.TransferReopened), "before it has acknowledged anything"


async def test_a_shard_that_acknowledges_nothing_is_given_up(bench: Bench) -> None:
    """S3"""
    bench.shard.acknowledges = False
    bench.open(progress_s=0.2)
    bench.compute()
    broken = await bench.heard(ev.TransferBroken)
    assert isinstance(broken, ev.TransferBroken)
    assert broken.fault.code is Code.DEADLINE_EXCEEDED, "which is silence, and no word of D's"
    assert isinstance(broken.fault, TransportFault)


async def test_a_shard_that_is_owed_nothing_may_be_silent(bench: Bench) -> None:
    bench.open(progress_s=0.5)
    await until(lambda: bench.shard.streams == 1)
    breaking = asyncio.create_task(bench.heard(ev.TransferBroken))
    await asyncio.wait([breaking], timeout=1.0)
    breaking.cancel()
    assert bench.events == []
    bench.compute()
    await bench.heard(ev.TransferCompleted)


async def test_a_transfer_is_let_go_and_that_is_confirmed(bench: Bench) -> None:
    bench.open()
    bench.bulk.close(KEY, 0)
    await bench.heard(ev.TransferClosed)
    bench.compute()
    bench.bulk.close(KEY, 0)
    await until(lambda: len(bench.events) == 2)
    assert bench.events == [ev.TransferClosed(KEY, 0)] * 2
    assert bench.shard.verified == []


async def test_stopping_lets_go_of_what_is_open(bench: Bench) -> None:
    bench.open()
    await asyncio.to_thread(bench.bulk.stop)
    assert bench.events == [ev.TransferClosed(KEY, 0)]
    bench.compute()
    bench.bulk = BulkSender(LAYOUT, bench.bulk._ranks, 1, SystemClock(), bench.events.append)
    bench.bulk.start()


async def test_an_aborting_shard_is_told_with_its_reason(bench: Bench) -> None:
    bench.shard.fault = Fault(Reason.KV_CORRUPT, "crc")
    bench.open()
    broken = await bench.heard(ev.TransferBroken)
    assert isinstance(broken, ev.TransferBroken) and isinstance(broken.fault, Fault)
    assert broken.fault.reason is Reason.KV_CORRUPT
