"""P's inline streams against a shard whose every word a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import google_crc32c
import grpc
import grpc.aio
import pytest

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.transport.base import Slab
from pd_grpc.transport.inline import InlineTransport
from pd_grpc.v1 import transfer_pb2, transfer_pb2_grpc, types_pb2
from tests.waiting import LIMIT_S, until

LAYOUT = KvLayout(
    model="m",
    positions="p",
    block_size=2,
    groups=(
        KvGroup(
            GroupKind.FULL,
            3,
            (Plane(PlaneKind.K, "uint8", 1, 4), Plane(PlaneKind.V, "uint8", 1, 4)),
        ),
    ),
)
LAYER = LAYOUT.layer_bytes(0)
Handler = Callable[[Any, Any], Awaitable[None]]


class Shard(transfer_pb2_grpc.TransferServiceServicer):
    """Does what `behave` says."""

    def __init__(self) -> None:
        self.behave: Handler = take_all
        self.requests: list[transfer_pb2.TransferRequest] = []
        self.metadata: dict[str, Any] = {}
        self.ended = asyncio.Event()

    async def Transfer(self, requests: Any, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        try:
            await self.behave(self._kept(requests), context)
        finally:
            self.ended.set()

    async def _kept(self, requests: Any) -> AsyncIterator[transfer_pb2.TransferRequest]:
        async for request in requests:
            self.requests.append(request)
            yield request


async def take_all(requests: Any, context: Any) -> None:
    """A shard that accepts everything."""
    accepted = chunks = 0
    async for request in requests:
        kind = request.WhichOneof("message")
        if kind == "open":
            await context.write(_opened())
        elif kind == "chunk":
            accepted, chunks = accepted + len(request.chunk.payload), chunks + 1
            ack = transfer_pb2.TransferAck(accepted_bytes=accepted)
            ack.ranges.add(
                group=request.chunk.group,
                layer_start=request.chunk.layer_start,
                layer_count=request.chunk.layer_count,
                block_start=request.chunk.block_start,
                block_count=request.chunk.block_count,
            )
            await context.write(transfer_pb2.TransferResponse(ack=ack))
        else:
            done = transfer_pb2.TransferCompleted(chunks=chunks, bytes=accepted)
            await context.write(transfer_pb2.TransferResponse(completed=done))
            return


def _opened() -> transfer_pb2.TransferResponse:
    opened = transfer_pb2.TransferOpened(window_bytes=1 << 20)
    opened.verified.add(group=0, layer_start=1, layer_count=2, block_start=3, block_count=4)
    return transfer_pb2.TransferResponse(opened=opened)


class Heard:
    """What a listener was told, in order."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.slabs: list[Slab] = []
        self.window_bytes = 0
        self.accepted_bytes = 0
        self.fault: Fault | TransportFault | None = None

    def opened(self, verified: Sequence[Slab], window_bytes: int) -> None:
        self.words.append("opened")
        self.slabs, self.window_bytes = list(verified), window_bytes

    def acked(self, ranges: Sequence[Slab], accepted_bytes: int) -> None:
        self.words.append("acked")
        self.slabs, self.accepted_bytes = list(ranges), accepted_bytes

    def completed(self) -> None:
        self.words.append("completed")

    def broken(self, fault: Fault | TransportFault, stopped: bool = True) -> None:
        assert stopped, "D does the writing"
        self.words.append("broken")
        self.fault = fault

    async def said(self, word: str) -> None:
        await until(lambda: word in self.words)


class Bench:
    """One shard, one pool of known bytes, one transport."""

    def __init__(self, shard: Shard, endpoint: str) -> None:
        self.shard = shard
        self.endpoint = endpoint
        pool = bytes(i * 7 % 251 for i in range(8 * LAYOUT.block_bytes))
        self.pool = pool
        self.channels: list[grpc.aio.Channel] = []
        self.transport = InlineTransport(HostKvMemory(bytearray(pool), LAYOUT), self._connect)
        self.heard = Heard()

    def _connect(self, endpoint: str) -> grpc.aio.Channel:
        self.channels.append(grpc.aio.insecure_channel(endpoint))
        return self.channels[-1]

    def closed(self) -> list[bool]:
        """Of each connection, in order."""
        down = grpc.ChannelConnectivity.SHUTDOWN
        return [channel.get_state() is down for channel in self.channels]

    def open(self, timeout_s: float = 10) -> Any:
        message = transfer_pb2.TransferOpen(
            session_id="s", grant_id="g", ref=types_pb2.TransferRef(transfer_id="t", attempt=1)
        )
        return self.transport.open(
            self.endpoint, message, self.heard, timeout_s, [("traceparent", "here")]
        )

    def layers(self, block: int, layer: int, layers: int) -> bytes:
        at = block * LAYOUT.block_bytes + layer * LAYER
        return self.pool[at : at + layers * LAYER]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    server, shard = grpc.aio.server(), Shard()
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(shard, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = Bench(shard, f"127.0.0.1:{port}")
    yield made
    await made.transport.stop()
    await server.stop(0)


async def test_a_chunk_carries_the_layers_of_its_blocks_in_the_canonical_order(
    bench: Bench,
) -> None:
    stream = bench.open()
    await bench.heard.said("opened")
    assert bench.heard.slabs == [Slab(0, 1, 2, 3, 4)]
    assert bench.heard.window_bytes == 1 << 20
    assert await stream.write(Slab(0, 1, 2, 5, 3), [6, 0, 2])
    await bench.heard.said("acked")
    assert bench.heard.slabs == [Slab(0, 1, 2, 5, 3)]
    assert bench.heard.accepted_bytes == 6 * LAYER
    assert await stream.end(1, 6 * LAYER)
    await bench.heard.said("completed")
    await stream.finished()
    opened, chunk, end = bench.shard.requests
    assert (opened.open.session_id, opened.open.grant_id) == ("s", "g")
    payload = b"".join(bench.layers(block, 1, 2) for block in (6, 0, 2))
    assert chunk.chunk.payload == payload
    assert chunk.chunk.crc32c == google_crc32c.value(payload)
    assert (end.end.chunks, end.end.bytes) == (1, len(payload))
    assert bench.shard.metadata["traceparent"] == "here"
    assert bench.heard.words == ["opened", "acked", "completed"]


async def test_a_shard_that_has_everything_before_the_end_is_not_believed(bench: Bench) -> None:
    async def complete_at_once(requests: Any, context: Any) -> None:
        await context.write(_opened())
        await context.write(transfer_pb2.TransferResponse(completed={}))

    bench.shard.behave = complete_at_once
    stream = bench.open()
    await bench.heard.said("broken")
    assert isinstance(bench.heard.fault, Fault)
    assert bench.heard.fault.metadata == {"state": "completed"}
    assert not await stream.end(0, 0)
    await stream.finished()
    assert bench.heard.words == ["opened", "broken"]


async def test_a_shards_refusal_is_heard_with_its_reason(bench: Bench) -> None:
    async def refuse(requests: Any, context: Any) -> None:
        await anext(requests)
        await rpc.abort(context, Fault(Reason.LEASE_EXPIRED, "over"))

    bench.shard.behave = refuse
    stream = bench.open()
    await bench.heard.said("broken")
    assert isinstance(bench.heard.fault, Fault)
    assert bench.heard.fault.reason is Reason.LEASE_EXPIRED
    assert not await stream.write(Slab(0, 0, 1, 0, 1), [0])
    await stream.close()
    assert bench.heard.words == ["broken"]


async def test_a_shard_that_cannot_be_reached_is_heard_as_lost(bench: Bench) -> None:
    bench.endpoint = "127.0.0.1:1"
    stream = bench.open()
    await bench.heard.said("broken")
    assert isinstance(bench.heard.fault, TransportFault) and bench.heard.fault.peer_lost
    assert not await stream.write(Slab(0, 0, 1, 0, 1), [0])
    assert not await stream.end(0, 0)


async def test_a_stream_that_ends_well_before_it_is_complete_is_broken(bench: Bench) -> None:
    async def leave(requests: Any, context: Any) -> None:
        await anext(requests)
        await context.write(_opened())

    bench.shard.behave = leave
    bench.open()
    await bench.heard.said("broken")
    assert isinstance(bench.heard.fault, TransportFault) and bench.heard.fault.peer_lost


async def test_a_stream_whose_time_is_over_is_broken(bench: Bench) -> None:
    async def sleep(requests: Any, context: Any) -> None:
        await asyncio.Event().wait()

    bench.shard.behave = sleep
    bench.open(timeout_s=0.1)
    await bench.heard.said("broken")
    assert isinstance(bench.heard.fault, TransportFault)
    assert bench.heard.fault.code is Code.DEADLINE_EXCEEDED


async def test_closing_cancels_the_call_and_is_not_heard(bench: Bench) -> None:
    stream = bench.open()
    await bench.heard.said("opened")
    await stream.close()
    await asyncio.wait_for(bench.shard.ended.wait(), LIMIT_S)
    assert not await stream.write(Slab(0, 0, 1, 0, 1), [0])
    assert bench.heard.words == ["opened"]


async def test_closing_ends_a_write_that_a_stalled_shard_holds_up(bench: Bench) -> None:
    async def stall(requests: Any, context: Any) -> None:
        await context.write(_opened())
        await asyncio.Event().wait()

    bench.shard.behave = stall
    stream = bench.open()
    await bench.heard.said("opened")

    async def flood() -> None:
        while await stream.write(Slab(0, 0, 3, 0, 8), list(range(8)) * 1000):
            pass

    writing = asyncio.create_task(flood())
    await asyncio.wait([writing], timeout=0.3)
    assert not writing.done()
    await stream.close()
    await asyncio.wait_for(writing, LIMIT_S)
    assert bench.heard.words == ["opened"]


async def test_a_connection_is_closed_when_its_endpoint_is_forgotten(bench: Bench) -> None:
    stream = bench.open()
    await bench.heard.said("opened")
    await stream.close()
    assert bench.closed() == [False], "the next stream goes by it"
    bench.transport.forget(bench.endpoint)
    await until(lambda: bench.closed() == [True])


async def test_an_endpoint_that_is_forgotten_keeps_its_streams_to_their_end(bench: Bench) -> None:
    ending, cut = bench.open(), bench.open()
    await until(lambda: bench.heard.words == ["opened"] * 2)
    bench.transport.forget(bench.endpoint)
    later = bench.open()
    await until(lambda: bench.heard.words == ["opened"] * 3)
    assert await ending.write(Slab(0, 0, 1, 0, 1), [0])
    assert await ending.end(1, LAYER)
    await bench.heard.said("completed")
    await ending.finished()
    assert bench.closed() == [False, False], "a stream is open by either"
    await cut.close()
    await until(lambda: bench.closed() == [True, False])
    await later.close()
    assert bench.heard.words == ["opened"] * 3 + ["acked", "completed"]


async def test_a_transport_that_stops_closes_what_it_has_forgotten_too(bench: Bench) -> None:
    bench.open()
    await bench.heard.said("opened")
    bench.transport.forget(bench.endpoint)
    bench.open()
    await until(lambda: bench.heard.words == ["opened"] * 2)
    await bench.transport.stop()
    assert bench.closed() == [True, True]
