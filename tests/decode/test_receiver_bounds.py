"""What a sender cannot make a shard keep."""

from __future__ import annotations

import asyncio

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.decode import receiver
from pd_grpc.decode.transfer_outbox import MAX_ACK_RANGES, TransferOutbox
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.v1 import transfer_pb2, types_pb2
from tests.decode.receiver_shard import EPOCH, LAYER, Shard
from tests.waiting import LIMIT_S

WINDOW = 4096
FITS = WINDOW // (6 * LAYER)
"""Chunks of six block-layers that a window holds."""


def test_a_sender_that_goes_on_beyond_its_window_fails_its_transfer() -> None:
    shard = Shard(window_bytes=WINDOW)
    shard.acks_leave = False
    stream = shard.stream()
    for _ in range(FITS):
        shard.chunk(stream, (0, 2), (0, 3))
    assert stream not in shard.ends
    shard.chunk(stream, (0, 2), (0, 3))
    fault = shard.fault(stream)
    assert fault.reason is Reason.BAD_REQUEST
    assert f"the window is {WINDOW}" in fault.fields[0].description
    assert shard.told().code is Code.INTERNAL


def test_a_sender_whose_acks_leave_may_go_on_for_ever() -> None:
    shard = Shard(window_bytes=WINDOW)
    stream = shard.stream()
    for _ in range(3 * FITS):
        shard.chunk(stream, (0, 2), (0, 3))
    assert stream not in shard.ends
    assert shard.responses[stream][-1].ack.accepted_bytes == 3 * FITS * 6 * LAYER
    progress = ev.ReceiveProgress("g", 6 * LAYER)
    assert shard.events == [ev.ReceiveStarted("g"), progress], "the same again is no progress"


def test_the_window_opens_again_by_what_was_acknowledged() -> None:
    shard = Shard(window_bytes=WINDOW)
    shard.acks_leave = False
    stream = shard.stream()
    for _ in range(FITS):
        shard.chunk(stream, (0, 2), (0, 3))
    shard.receiver.acknowledged(stream, 6 * LAYER)
    shard.chunk(stream, (0, 2), (0, 3))
    assert stream not in shard.ends
    shard.chunk(stream, (0, 2), (0, 3))
    assert shard.fault(stream).reason is Reason.BAD_REQUEST


def test_of_streams_without_a_grant_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "HELD_STREAMS", 3)
    shard = Shard(grant=False)
    held = [shard.stream(grant_id=f"other-{i}") for i in range(3)]
    refused = shard.fault(shard.stream())
    assert refused.reason is Reason.QUEUE_FULL and refused.code is Code.RESOURCE_EXHAUSTED
    shard.gone(held[0])
    late = shard.stream()
    shard.grant()
    shard.everything(late)
    shard.end(late, 2, 8 * LAYER)
    assert shard.ends[late] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"grant_id": "g" * 129},
        {"grant_id": ""},
        {"ref": types_pb2.TransferRef(transfer_id="t" * 129, attempt=1, decode_epoch=EPOCH)},
    ],
)
def test_an_open_with_a_name_of_no_use_is_refused(fields: dict[str, object]) -> None:
    shard = Shard(grant=False)
    assert shard.fault(shard.stream(**fields)).reason is Reason.BAD_REQUEST


def ack(block: int, accepted: int) -> transfer_pb2.TransferResponse:
    message = transfer_pb2.TransferAck(accepted_bytes=accepted)
    message.ranges.add(layer_count=1, block_start=block, block_count=1)
    return transfer_pb2.TransferResponse(ack=message)


async def test_acks_that_wait_become_one_with_a_range_for_each() -> None:
    outbox = TransferOutbox()
    outbox.send(transfer_pb2.TransferResponse(opened=transfer_pb2.TransferOpened()))
    for i in range(3):
        outbox.send(ack(i, 10 * (i + 1)))
    outbox.send(transfer_pb2.TransferResponse(completed=transfer_pb2.TransferCompleted()))
    outbox.end(None)
    outbox.end(Fault(Reason.SUPERSEDED, "too late"))
    opened, merged, completed = [await outbox.next() for _ in range(3)]
    assert opened is not None and opened.HasField("opened")
    assert merged is not None and merged.ack.accepted_bytes == 30
    assert [r.block_start for r in merged.ack.ranges] == [0, 1, 2]
    assert completed is not None and completed.HasField("completed")
    assert await outbox.next() is None


async def test_with_many_ranges_waiting_nothing_more_is_read() -> None:
    outbox = TransferOutbox()
    for i in range(MAX_ACK_RANGES):
        await asyncio.wait_for(outbox.room(), LIMIT_S)
        outbox.send(ack(i, i))
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    merged = await outbox.next()
    assert merged is not None and len(merged.ack.ranges) == MAX_ACK_RANGES
    await asyncio.wait_for(waiting, LIMIT_S)


async def test_a_fault_follows_what_was_sent_before_it() -> None:
    outbox = TransferOutbox()
    outbox.send(ack(0, 1))
    outbox.end(Fault(Reason.CLIENT_GONE, "gone"))
    first = await outbox.next()
    assert first is not None and first.HasField("ack")
    with pytest.raises(Fault, match="gone"):
        await outbox.next()
