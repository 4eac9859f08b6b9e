"""A shard over sockets: stock stubs against it, a memory that fails, a peer that does not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import google_crc32c
import grpc.aio
import pytest

from pd_grpc.decode import actions as act
from pd_grpc.decode import events as ev
from pd_grpc.decode.bulk import BulkServer
from pd_grpc.decode.receiver import Receiver
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.transport.chunk_codec import TRANSFER_METHOD
from pd_grpc.v1 import transfer_pb2, transfer_pb2_grpc, types_pb2
from tests.decode.receiver_shard import EPOCH, KEY, LAYER, LAYOUT, OWNER, TABLE, WANTED
from tests.decode.wire import fault_of

WINDOW = 4096
SMALL_BUFFERS = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
"""What a peer does not read shall stay on the other side."""


class Memory(HostKvMemory):
    """May fail to be written."""

    fails = False

    def write(self, *args: Any) -> None:
        if self.fails:
            raise ValueError("the pool is smaller than it said")
        super().write(*args)


class Served:
    """One shard with one grant."""

    def __init__(self) -> None:
        config = DecodeConfig(send_window_bytes=WINDOW)
        self.buffer = bytearray(8 * LAYOUT.block_bytes)
        self.memory = Memory(self.buffer, LAYOUT)
        receiver = Receiver(config, LAYOUT, self.memory, EPOCH)
        self.bulk = BulkServer(config, receiver, SystemClock())
        self.events: list[ev.Event] = []
        self.bulk.listeners.append(self.events.append)

    def start(self) -> None:
        self.bulk.start()
        self.bulk.post(act.AdmitSession(OWNER, "s"))
        self.bulk.post(act.OpenReceive("g", KEY, OWNER, tuple(TABLE), ((0, WANTED),)))

    def failures(self) -> list[Fault]:
        return [e.fault for e in self.events if isinstance(e, ev.ReceiveFailed)]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    shard = Served()
    await asyncio.to_thread(shard.start)
    yield shard
    await asyncio.to_thread(shard.bulk.stop)


@pytest.fixture
async def stub(served: Served) -> AsyncIterator[transfer_pb2_grpc.TransferServiceStub]:
    async with grpc.aio.insecure_channel(served.bulk.endpoint) as channel:
        yield transfer_pb2_grpc.TransferServiceStub(channel)


def opening() -> transfer_pb2.TransferRequest:
    ref = types_pb2.TransferRef(transfer_id="t", attempt=1, decode_epoch=EPOCH)
    message = transfer_pb2.TransferOpen(session_id="s", grant_id="g", ref=ref)
    return transfer_pb2.TransferRequest(open=message)


def chunk(group: int = 0, layers: int = 3) -> transfer_pb2.TransferRequest:
    payload = bytes(range(100, 100 + WANTED * layers * LAYER))
    return transfer_pb2.TransferRequest(
        chunk=transfer_pb2.KvChunk(
            group=group,
            layer_count=layers,
            block_count=WANTED,
            crc32c=google_crc32c.value(payload),
            payload=payload,
        )
    )


async def test_a_stock_stub_sends_kv_and_completes(served: Served, stub: Any) -> None:
    call = stub.Transfer(timeout=60)
    size = 0
    for message in (opening(), chunk(), chunk(1, 1)):
        await call.write(message)
        size += len(message.chunk.payload)
        answer = await call.read()
    assert answer.ack.accepted_bytes == size == 8 * LAYER
    end = transfer_pb2.TransferEnd(chunks=2, bytes=size)
    await call.write(transfer_pb2.TransferRequest(end=end))
    assert (await call.read()).completed.bytes == size
    assert await call.code() is grpc.StatusCode.OK
    at = TABLE[1] * LAYOUT.block_bytes
    assert served.buffer[at : at + 3 * LAYER] == chunk().chunk.payload[3 * LAYER :]


async def test_a_half_close_without_end_is_ok_and_completes_nothing(
    served: Served, stub: Any
) -> None:
    call = stub.Transfer(timeout=60)
    for message in (opening(), chunk(), chunk(1, 1)):
        await call.write(message)
    await call.done_writing()
    answers = [answer async for answer in call]
    opened, *acks = [answer.WhichOneof("message") for answer in answers]
    assert opened == "opened" and set(acks) == {"ack"}
    assert answers[-1].ack.accepted_bytes == 8 * LAYER
    assert await call.code() is grpc.StatusCode.OK
    assert not [e for e in served.events if isinstance(e, ev.ReceiveCompleted)]
    again = stub.Transfer(timeout=60)
    end = transfer_pb2.TransferEnd(chunks=0, bytes=0)
    for message in (opening(), transfer_pb2.TransferRequest(end=end)):
        await again.write(message)
        answer = await again.read()
    assert answer.HasField("completed")


async def test_what_is_no_message_is_refused(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.bulk.endpoint) as channel:
        transfer: Any = channel.stream_stream(TRANSFER_METHOD, None, None)
        stream = transfer(timeout=60)
        await stream.write(b"\x12\x05\x08")
        assert (await fault_of(stream)).reason is Reason.BAD_REQUEST


async def test_a_memory_that_cannot_be_written_fails_the_transfer_and_is_logged(
    served: Served, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served.memory.fails = True
    call = stub.Transfer(timeout=60)
    await call.write(opening())
    await call.read()
    await call.write(chunk())
    fault = await fault_of(call)
    assert fault.reason is Reason.ENGINE_ERROR and fault.code is Code.INTERNAL
    (told,) = served.failures()
    assert told.reason is Reason.ENGINE_ERROR
    assert "smaller than it said" in caplog.text
    assert not any(served.buffer)


async def test_a_peer_that_reads_no_ack_is_stopped_at_its_window(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.bulk.endpoint, SMALL_BUFFERS) as channel:
        call: Any = transfer_pb2_grpc.TransferServiceStub(channel).Transfer(timeout=60)
        await call.write(opening())
        # How many it takes depends on how many acks D had time to make one of.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while not served.failures():
                await call.write(chunk())
        (told,) = served.failures()
        assert f"the window is {WINDOW}" in told.message
        call.cancel()
