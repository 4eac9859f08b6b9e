"""One shard of several on D, and several shards of P that send to it, without sockets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import google_crc32c
import pytest

from pd_grpc.decode import events as ev
from pd_grpc.decode.receiver import EndStream, Receiver, Respond
from pd_grpc.decode.transfer import Owner
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.shards import NOTHING, Part, Place, cut, whole
from pd_grpc.transport.chunk_codec import split_chunk
from pd_grpc.v1 import layout_pb2, transfer_pb2, types_pb2

KEY, OWNER = TransferKey("t", 1), Owner("p", 10)
LAYOUT = KvLayout(
    model="m",
    positions="p",
    block_size=2,
    groups=(
        KvGroup(
            GroupKind.FULL,
            3,
            (Plane(PlaneKind.K, "uint8", 4, 3), Plane(PlaneKind.V, "float16", 4, 2)),
        ),
        KvGroup(GroupKind.FULL, 1, (Plane(PlaneKind.K, "uint8", 4, 1),)),
    ),
)
TABLE, BLOCKS = (5, 1, 3), 7
MINE = Part(1, 3, 2, 2)
"""What this shard of D holds: heads 2 and 3 of all layers but the first."""


class Rank:
    """A shard of D with one grant, and the model's KV as a plain file of whole blocks."""

    def __init__(self, senders: Sequence[Place], part: Part = MINE, shard: int = 1) -> None:
        self.buffer = bytearray(BLOCKS * part.block_bytes(LAYOUT))
        memory = HostKvMemory(self.buffer, LAYOUT, part=part)
        self.part, self.shard = part, shard
        self.receiver = Receiver(DecodeConfig(), LAYOUT, memory, 5, None, shard, part)
        self.receiver.sessions.admit(OWNER, "s")
        self.content = random.Random(1).randbytes(len(TABLE) * LAYOUT.block_bytes)
        self.source = HostKvMemory(bytearray(self.content), LAYOUT)
        self.senders = tuple(senders)
        self.events: list[ev.Event] = []
        self.responses: dict[int, list[transfer_pb2.TransferResponse]] = {}
        self.ends: dict[int, Fault | None] = {}
        self.sums: dict[int, tuple[int, int]] = {}
        arguments = "g", KEY, OWNER, TABLE, [(0, len(TABLE))], layout_pb2.TRANSPORT_INLINE
        self.note(self.receiver.open_grant(*arguments, self.senders))

    def open(self, sender: int, sends: Part | None = None, **fields: Any) -> int:
        """A stream of one of P's shards."""
        stream = len(self.responses) + 1
        self.receiver.stream_began(stream)
        self.responses[stream], self.sums[stream] = [], (0, 0)
        ref = types_pb2.TransferRef(transfer_id="t", attempt=1, decode_epoch=5)
        message = transfer_pb2.TransferOpen(
            session_id="s",
            ref=ref,
            grant_id="g",
            shard_index=self.shard,
            sender=self.senders[sender].to_proto(),
            sends=None if sends is None else sends.to_proto(),
        )
        message.MergeFrom(transfer_pb2.TransferOpen(**fields))
        self.send(stream, transfer_pb2.TransferRequest(open=message))
        return stream

    def chunk(self, stream: int, part: Part, group: int, layer: int, **fields: Any) -> None:
        """One layer of all blocks, with the heads of `part`."""
        heads = part.head, part.heads
        pieces = self.source.read(range(len(TABLE)), group, layer, 1, heads)
        payload = b"".join(pieces)
        message = transfer_pb2.KvChunk(
            **{
                "group": group,
                "layer_start": layer,
                "layer_count": 1,
                "block_count": len(TABLE),
                **fields,
            },
            payload=payload,
            crc32c=google_crc32c.value(payload),
        )
        chunks, size = self.sums[stream]
        self.sums[stream] = chunks + 1, size + len(payload)
        self.send(stream, transfer_pb2.TransferRequest(chunk=message))

    def everything(self, stream: int, part: Part) -> None:
        """All that a stream is to bring."""
        for group, first, layers in part.runs(LAYOUT):
            for layer in range(first, first + layers):
                self.chunk(stream, part, group, layer)

    def end(self, stream: int) -> None:
        """The stream has sent everything."""
        chunks, size = self.sums[stream]
        end = transfer_pb2.TransferEnd(chunks=chunks, bytes=size)
        self.send(stream, transfer_pb2.TransferRequest(end=end))

    def send(self, stream: int, message: transfer_pb2.TransferRequest) -> None:
        self.note(self.receiver.message(stream, split_chunk(message), 1.0))

    def note(self, actions: Sequence[object]) -> None:
        for action in actions:
            if isinstance(action, Respond):
                self.responses[action.stream].append(action.message)
                if action.message.HasField("ack"):
                    told = action.message.ack.accepted_bytes
                    self.receiver.acknowledged(action.stream, told)
            elif isinstance(action, EndStream):
                self.ends[action.stream] = action.fault
            else:
                self.events.append(action)  # type: ignore[arg-type]

    def refused(self, stream: int, field: str) -> None:
        """The stream was refused at open, and nothing else happened."""
        fault = self.ends[stream]
        assert fault is not None and fault.reason is Reason.BAD_REQUEST
        assert [each.field for each in fault.fields] == [field]
        assert not self.responses[stream]
        assert not any(isinstance(event, ev.ReceiveFailed) for event in self.events)

    def failed(self, field: str) -> None:
        """The transfer has failed."""
        (event,) = [event for event in self.events if isinstance(event, ev.ReceiveFailed)]
        assert event.shard == self.shard and event.fault.reason is Reason.BAD_REQUEST
        assert not any(isinstance(event, ev.ReceiveCompleted) for event in self.events)
        (fault,) = [fault for fault in self.ends.values() if fault is not None]
        assert [each.field for each in fault.fields] == [field]

    def right(self) -> None:
        """Its blocks are the model's, restricted to what it holds, and no other is written to."""
        there = HostKvMemory(self.buffer, LAYOUT, part=self.part)
        heads = self.part.head, self.part.heads
        for group, first, layers in self.part.runs(LAYOUT):
            wanted = self.source.read(range(len(TABLE)), group, first, layers, heads)
            assert b"".join(there.read(TABLE, group, first, layers)) == b"".join(wanted)
        size = self.part.block_bytes(LAYOUT)
        for block in set(range(BLOCKS)) - {*TABLE}:
            assert not any(self.buffer[block * size : (block + 1) * size])


ONE = (Place(whole(LAYOUT)),)
QUARTERS = cut(LAYOUT, 4, 1)
EIGHT = cut(LAYOUT, 8, 1)
STAGES = cut(LAYOUT, 2, 2)


def strands(senders: Sequence[Place], part: Part = MINE) -> dict[int, Part]:
    """What each of them brings, the first of those that hold the same."""
    found: dict[int, Part] = {}
    for i, place in enumerate(senders):
        common = place.part.common(part)
        if common.area:
            found[i] = NOTHING if common in found.values() else common
    return found


@pytest.mark.parametrize("senders", [ONE, QUARTERS, EIGHT, STAGES])
def test_it_is_complete_when_every_sender_has_ended(senders: Sequence[Place]) -> None:
    rank = Rank(senders)
    brought = strands(senders)
    streams = {i: rank.open(i, part) for i, part in brought.items()}
    for i, part in brought.items():
        assert not any(isinstance(event, ev.ReceiveCompleted) for event in rank.events)
        rank.everything(streams[i], part)
        rank.end(streams[i])
        assert rank.responses[streams[i]][-1].HasField("completed")
    assert rank.events[0] == ev.ReceiveStarted("g", 1)
    assert rank.events[-1] == ev.ReceiveCompleted("g", 1)
    assert sum(isinstance(event, ev.ReceiveCompleted) for event in rank.events) == 1
    assert set(rank.ends.values()) == {None}
    rank.right()


def test_sends_may_be_left_out_and_heads_be_named() -> None:
    rank = Rank(QUARTERS)
    for i in (2, 3):
        part = QUARTERS[i].part.common(MINE)
        stream = rank.open(i)
        for group, first, layers in part.runs(LAYOUT):
            for layer in range(first, first + layers):
                rank.chunk(stream, part, group, layer, head_start=part.head, head_count=1)
        rank.end(stream)
    assert rank.events[-1] == ev.ReceiveCompleted("g", 1)
    rank.right()


def test_those_that_hold_the_same_may_share_it() -> None:
    rank = Rank(EIGHT)
    parts = {4: Part(1, 1, 2, 1), 5: Part(2, 2, 2, 1), 6: NOTHING, 7: Part(1, 3, 3, 1)}
    for i, part in parts.items():
        stream = rank.open(i, part)
        rank.everything(stream, part)
        rank.end(stream)
    assert rank.events[-1] == ev.ReceiveCompleted("g", 1)
    rank.right()


def test_a_stream_that_is_opened_again_is_told_of_its_own_part_alone() -> None:
    rank = Rank(QUARTERS)
    two, three = (QUARTERS[i].part.common(MINE) for i in (2, 3))
    first = rank.open(2)
    rank.everything(first, two)
    other = rank.open(3)
    assert not rank.responses[other][0].opened.verified
    rank.chunk(other, three, 0, 1)
    rank.receiver.stream_ended(other)
    again = rank.open(3)
    listed = [(r.group, r.layer_start) for r in rank.responses[again][0].opened.verified]
    assert listed == [(0, 1)]
    rank.chunk(again, three, 0, 2)
    rank.chunk(again, three, 1, 0)
    rank.end(again)
    rank.end(first)
    assert rank.events[-1] == ev.ReceiveCompleted("g", 1)
    rank.right()


def test_a_newer_stream_takes_over_from_that_of_the_same_sender_alone() -> None:
    rank = Rank(QUARTERS)
    first, other = rank.open(2), rank.open(3)
    rank.open(2)
    fault = rank.ends[first]
    assert fault is not None and fault.reason is Reason.SUPERSEDED
    assert other not in rank.ends
    rank.note(rank.receiver.close_grant("g", Fault(Reason.RELEASED, "x"), 1.0))
    assert len(rank.ends) == 3
    assert rank.events[-1] == ev.ReceiveClosed("g", 1)


@pytest.mark.parametrize(
    ("sends", "field"),
    [
        (Part(1, 3, 0, 3), "open.sends"),
        (Part(0, 4, 2, 1), "open.sends"),
        (Part(1, 4, 2, 1), "open.sends"),
        (Part(0, 0, 2, 1), "open.sends"),
    ],
)
def test_what_is_beyond_both_shards_is_refused_at_open(sends: Part, field: str) -> None:
    rank = Rank(QUARTERS)
    rank.refused(rank.open(2, sends), field)


def test_what_another_stream_brings_is_refused_at_open() -> None:
    rank = Rank(EIGHT)
    rank.open(4)
    rank.refused(rank.open(5), "open.sends")
    rank.refused(rank.open(5, Part(3, 1, 2, 1)), "open.sends")
    rank.open(5, NOTHING)
    rank.refused(rank.open(5, Part(3, 1, 2, 1)), "open.sends")


def test_who_has_nothing_in_common_is_refused_at_open() -> None:
    rank = Rank(QUARTERS)
    rank.refused(rank.open(0), "open.shard_index")
    rank.refused(rank.open(2, shard_index=2), "open.shard_index")


@pytest.mark.parametrize(
    "sender",
    [
        layout_pb2.Shard(tp_rank=2, tp_size=4),
        layout_pb2.Shard(tp_rank=1, tp_size=4, head_start=2, head_count=1),
        layout_pb2.Shard(tp_rank=2, tp_size=5, head_start=2, head_count=1),
        layout_pb2.Shard(),
    ],
)
def test_f59_a_sender_that_the_session_has_not_is_refused_at_open(
    sender: layout_pb2.Shard,
) -> None:
    rank = Rank(QUARTERS)
    stream = len(rank.responses) + 1
    rank.receiver.stream_began(stream)
    rank.responses[stream] = []
    ref = types_pb2.TransferRef(transfer_id="t", attempt=1, decode_epoch=5)
    message = transfer_pb2.TransferOpen(
        session_id="s", ref=ref, grant_id="g", shard_index=1, sender=sender
    )
    rank.send(stream, transfer_pb2.TransferRequest(open=message))
    rank.refused(stream, "open.sender")


def test_one_of_several_must_say_which() -> None:
    rank = Rank(QUARTERS)
    stream = 1
    rank.receiver.stream_began(stream)
    rank.responses[stream] = []
    ref = types_pb2.TransferRef(transfer_id="t", attempt=1, decode_epoch=5)
    message = transfer_pb2.TransferOpen(session_id="s", ref=ref, grant_id="g", shard_index=1)
    rank.send(stream, transfer_pb2.TransferRequest(open=message))
    rank.refused(stream, "open.sender")


@pytest.mark.parametrize(
    ("group", "layer", "fields", "field"),
    [
        (0, 0, {}, "chunk.layer_start"),
        (1, 0, {"layer_start": 1}, "chunk.layer_start"),
        (0, 1, {"head_start": 3, "head_count": 1}, "chunk.head_start"),
        (0, 1, {"head_start": 2, "head_count": 2}, "chunk.head_start"),
        (0, 1, {"head_start": 2}, "chunk.head_start"),
    ],
)
def test_a_chunk_outside_what_its_stream_brings_fails_the_transfer(
    group: int, layer: int, fields: dict[str, int], field: str
) -> None:
    rank = Rank(QUARTERS)
    part = QUARTERS[2].part.common(MINE)
    rank.chunk(rank.open(2), part, group, layer, **fields)
    rank.failed(field)
    assert not any(rank.buffer)


def test_an_end_before_all_of_its_own_fails_the_transfer() -> None:
    rank = Rank(QUARTERS)
    stream = rank.open(2)
    rank.chunk(stream, QUARTERS[2].part.common(MINE), 0, 1)
    rank.end(stream)
    rank.failed("end")


def test_heads_that_nobody_sends_fail_the_transfer_at_the_last_end() -> None:
    rank = Rank(EIGHT)
    for i in (4, 5, 6):
        stream = rank.open(i, NOTHING)
        rank.end(stream)
        assert rank.ends[stream] is None
    part = EIGHT[7].part.common(MINE)
    last = rank.open(7, part)
    rank.everything(last, part)
    rank.end(last)
    rank.failed("end")
