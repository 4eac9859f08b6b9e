"""The receiving half of `inline` without sockets: what is taken, what is refused, what is told."""

from __future__ import annotations

from typing import Any

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.protocol.faults import Code, Fault, Reason, bad_request
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import layout_pb2, transfer_pb2, types_pb2
from tests.decode.receiver_shard import EPOCH, KEY, LAYER, LAYOUT, OWNER, TABLE, Shard

NONSENSE = bad_request([FieldError("message", "is no protobuf")])


def range_of(group: int, layers: tuple[int, int], blocks: tuple[int, int]) -> transfer_pb2.KvRange:
    return transfer_pb2.KvRange(
        group=group,
        layer_start=layers[0],
        layer_count=layers[1],
        block_start=blocks[0],
        block_count=blocks[1],
    )


def test_kv_comes_in_is_acknowledged_and_completes() -> None:
    shard = Shard()
    stream = shard.stream()
    opened = shard.responses[stream][0].opened
    assert not opened.verified and opened.window_bytes == 12345
    payload = shard.chunk(stream, (0, 2), (0, 3))
    shard.chunk(stream, (0, 2), (0, 1), group=1)
    ack = shard.responses[stream][1].ack
    assert list(ack.ranges) == [range_of(0, (0, 3), (0, 2))]
    assert ack.accepted_bytes == 6 * LAYER
    assert shard.responses[stream][2].ack.accepted_bytes == 8 * LAYER
    assert shard.stored(1, 0, 2) == payload[5 * LAYER :], "block, then layer"
    shard.end(stream, 2, 8 * LAYER)
    completed = shard.responses[stream][-1].completed
    assert (completed.chunks, completed.bytes) == (2, 8 * LAYER)
    assert shard.ends == {stream: None}
    assert shard.events == [
        ev.ReceiveStarted("g"),
        ev.ReceiveProgress("g", 6 * LAYER),
        ev.ReceiveProgress("g", 2 * LAYER),
        ev.ReceiveCompleted("g"),
    ]


def test_only_the_blocks_granted_are_written() -> None:
    shard = Shard()
    stream = shard.stream()
    shard.everything(stream)
    for block in set(range(8)) - {TABLE[0], TABLE[1]}:
        at = block * LAYOUT.block_bytes
        assert not any(shard.buffer[at : at + LAYOUT.block_bytes])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("chunk.group", {"group": 2}),
        ("chunk.layer_start", {"layer_start": 3}),
        ("chunk.layer_start", {"layer_count": 4}),
        ("chunk.layer_start", {"layer_count": 0}),
        ("chunk.layer_start", {"layer_start": 2**32 - 1}),
        ("chunk.block_start", {"block_start": 2}),
        ("chunk.block_start", {"block_count": 3}),
        ("chunk.block_start", {"block_count": 0}),
        ("chunk.block_start", {"block_start": 2**32 - 1}),
        ("chunk.payload", {"payload": b"short"}),
        ("chunk.payload", {"payload": b""}),
    ],
)
def test_a_chunk_out_of_bounds_is_refused_and_fails_the_transfer(
    field: str, change: dict[str, Any]
) -> None:
    shard = Shard()
    stream = shard.stream()
    shard.chunk(stream, (0, 1), (0, 1), **change)
    fault = shard.fault(stream)
    assert fault.reason is Reason.BAD_REQUEST and fault.code is Code.INVALID_ARGUMENT
    assert field in [wrong.field for wrong in fault.fields]
    assert shard.told().code is Code.INTERNAL, "a client did nothing wrong"
    assert not any(shard.buffer)


def test_a_wrong_checksum_names_layers_and_blocks_and_is_not_written() -> None:
    shard = Shard()
    stream = shard.stream()
    shard.chunk(stream, (0, 2), (1, 2), crc32c=1)
    fault = shard.fault(stream)
    assert fault.reason is Reason.KV_CORRUPT and fault.code is Code.DATA_LOSS
    assert fault.metadata == {"group": "0", "layers": "[1, 3)", "blocks": "[0, 2)"}
    assert shard.told().reason is Reason.KV_CORRUPT
    assert not any(shard.buffer)


def test_a_descriptor_is_refused_as_not_built() -> None:
    shard = Shard()
    stream = shard.stream()
    descriptor = layout_pb2.MemoryDescriptor(kind=layout_pb2.TRANSPORT_SHM)
    shard.chunk(stream, (0, 1), (0, 1), descriptor=descriptor, payload=b"", crc32c=0)
    assert shard.fault(stream).reason is Reason.FEATURE


def test_the_same_range_again_is_acknowledged_and_never_written_twice() -> None:
    shard = Shard()
    stream = shard.stream()
    first = shard.chunk(stream, (0, 1), (0, 1))
    shard.buffer[TABLE[0] * LAYOUT.block_bytes] ^= 0xFF
    changed = shard.stored(0, 0, 0)
    shard.chunk(stream, (0, 1), (0, 1))
    assert shard.stored(0, 0, 0) == changed != first
    assert len(shard.responses[stream]) == 3
    assert shard.responses[stream][2].ack.accepted_bytes == 2 * LAYER


def test_a_range_again_after_all_is_complete_is_acknowledged() -> None:
    shard = Shard()
    stream = shard.stream()
    shard.everything(stream)
    shard.end(stream, 2, 8 * LAYER)
    again = shard.stream()
    shard.chunk(again, (0, 1), (0, 1))
    assert shard.responses[again][1].ack.accepted_bytes == LAYER
    shard.end(again, 1, LAYER)
    assert shard.ends[again] is None
    assert shard.events.count(ev.ReceiveCompleted("g")) == 1


@pytest.mark.parametrize(
    ("blocks", "layers"), [((0, 1), (0, 1)), ((0, 2), (0, 2)), ((1, 1), (1, 2)), ((0, 2), (0, 3))]
)
def test_a_range_that_overlaps_another_without_being_equal_is_refused_and_writes_nothing(
    blocks: tuple[int, int], layers: tuple[int, int]
) -> None:
    shard = Shard()
    stream = shard.stream()
    shard.chunk(stream, (0, 2), (0, 1))
    shard.chunk(stream, (1, 1), (1, 1))
    before = bytes(shard.buffer)
    shard.chunk(stream, blocks, layers)
    assert shard.fault(stream).reason is Reason.BAD_REQUEST
    assert "overlaps" in shard.told().message
    assert bytes(shard.buffer) == before


def test_a_reopened_stream_is_told_what_is_there_and_sends_the_rest() -> None:
    shard = Shard()
    stream = shard.stream()
    shard.chunk(stream, (1, 1), (0, 2))
    shard.chunk(stream, (0, 1), (1, 1))
    shard.gone(stream)
    again = shard.stream()
    assert shard.verified(again) == [(0, 0, 1, 1), (0, 1, 0, 2)]
    shard.chunk(again, (0, 1), (0, 1))
    shard.chunk(again, (0, 2), (2, 1))
    shard.chunk(again, (0, 2), (0, 1), group=1)
    shard.end(again, 3, 5 * LAYER)
    assert shard.ends[again] is None
    assert shard.events[-1] == ev.ReceiveCompleted("g")
    assert shard.events.count(ev.ReceiveStarted("g")) == 1


def test_a_stream_whose_completion_was_lost_may_ask_again() -> None:
    shard = Shard()
    stream = shard.stream()
    shard.everything(stream)
    shard.end(stream, 2, 8 * LAYER)
    again = shard.stream()
    assert len(shard.verified(again)) == 4
    shard.end(again, 0, 0)
    assert shard.responses[again][-1].HasField("completed")
    assert shard.ends[again] is None


@pytest.mark.parametrize(("chunks", "size"), [(1, 8 * LAYER), (2, 8 * LAYER - 1), (0, 0)])
def test_an_end_with_wrong_counts_is_refused(chunks: int, size: int) -> None:
    shard = Shard()
    stream = shard.stream()
    shard.everything(stream)
    shard.end(stream, chunks, size)
    assert shard.fault(stream).reason is Reason.BAD_REQUEST
    assert not any(isinstance(e, ev.ReceiveCompleted) for e in shard.events)


def test_an_end_with_something_missing_is_refused_and_names_it() -> None:
    """F58: every layer of every group must be there."""
    shard = Shard()
    stream = shard.stream()
    shard.chunk(stream, (0, 2), (0, 3))
    shard.end(stream, 1, 6 * LAYER)
    fault = shard.fault(stream)
    assert fault.reason is Reason.BAD_REQUEST
    assert "group 1, layer 0, block 0" in fault.message
    assert shard.told().code is Code.INTERNAL


def test_a_stream_that_stops_without_end_completes_nothing() -> None:
    """F38: a killed peer, a cancel and a half-close look the same."""
    shard = Shard()
    stream = shard.stream()
    shard.everything(stream)
    shard.gone(stream)
    assert not any(isinstance(e, ev.ReceiveCompleted | ev.ReceiveFailed) for e in shard.events)


def test_an_open_that_comes_before_its_grant_is_held() -> None:
    shard = Shard(grant=False)
    stream = shard.stream()
    assert shard.responses[stream] == [] and stream not in shard.ends
    assert shard.receiver.next_wake() == shard.now + shard.config.kv_progress_s
    shard.advance(shard.config.kv_progress_s / 2)
    shard.grant()
    assert shard.responses[stream][0].HasField("opened")
    assert shard.receiver.next_wake() is None
    shard.everything(stream)
    shard.end(stream, 2, 8 * LAYER)
    assert shard.ends[stream] is None


def test_an_open_whose_grant_never_comes_ends() -> None:
    shard = Shard(grant=False)
    stream = shard.stream()
    shard.advance(shard.config.kv_progress_s)
    fault = shard.fault(stream)
    assert fault.reason is Reason.UNKNOWN_TRANSFER and fault.code is Code.NOT_FOUND
    assert shard.events == []
    shard.grant()
    assert shard.responses[stream] == []


def test_a_held_stream_that_leaves_is_forgotten() -> None:
    shard = Shard(grant=False)
    stream = shard.stream()
    shard.gone(stream)
    assert shard.receiver.next_wake() is None
    shard.grant()
    assert shard.responses[stream] == [] and shard.events == []


def test_of_two_held_streams_the_newer_serves() -> None:
    shard = Shard(grant=False)
    older, newer = shard.stream(), shard.stream()
    shard.grant()
    assert shard.fault(older).reason is Reason.SUPERSEDED
    assert newer not in shard.ends
    shard.everything(newer)


def test_a_newer_stream_takes_over_and_the_older_is_told() -> None:
    shard = Shard()
    older = shard.stream()
    shard.chunk(older, (0, 1), (0, 1))
    newer = shard.stream()
    assert shard.fault(older).reason is Reason.SUPERSEDED
    assert shard.verified(newer) == [(0, 0, 0, 1)]
    shard.chunk(older, (1, 1), (0, 1))
    assert not any(shard.stored(1, 0, 0)), "the older one writes no more"
    shard.gone(older)
    shard.everything(newer)
    shard.end(newer, 2, 8 * LAYER)
    assert shard.ends[newer] is None


def test_a_close_ends_the_stream_with_its_cause_and_nothing_is_written_after() -> None:
    shard = Shard()
    stream = shard.stream()
    shard.close(Fault(Reason.CLIENT_GONE, "the client has left"))
    assert shard.fault(stream).reason is Reason.CLIENT_GONE
    assert shard.events[-1] == ev.ReceiveClosed("g")
    shard.chunk(stream, (0, 1), (0, 1))
    assert not any(shard.buffer)


def test_a_stream_that_comes_after_the_close_is_told_the_cause() -> None:
    shard = Shard()
    shard.close(Fault(Reason.LEASE_EXPIRED, "too late"))
    stream = shard.stream()
    fault = shard.fault(stream)
    assert fault.reason is Reason.LEASE_EXPIRED and fault.code is Code.NOT_FOUND
    assert shard.responses[stream] == []


def test_a_close_of_what_is_unknown_is_answered_all_the_same() -> None:
    shard = Shard(grant=False)
    shard.close(Fault(Reason.RELEASED, "gone"))
    assert shard.events == [ev.ReceiveClosed("g")]


def test_messages_out_of_order_are_refused() -> None:
    shard = Shard()
    stream = shard.stream()
    opened = transfer_pb2.TransferOpen(
        ref=types_pb2.TransferRef(transfer_id="t", attempt=1, decode_epoch=EPOCH), grant_id="g"
    )
    shard.send(stream, transfer_pb2.TransferRequest(open=opened))
    assert shard.fault(stream).reason is Reason.WRONG_STATE
    shard.receiver.stream_began(8)
    shard.chunk(8, (0, 1), (0, 1))
    assert shard.fault(8).reason is Reason.WRONG_STATE
    shard.receiver.stream_began(9)
    shard.send(9, transfer_pb2.TransferRequest())
    assert shard.fault(9).reason is Reason.BAD_REQUEST


def test_a_stream_nobody_opened_harms_no_grant() -> None:
    shard = Shard()
    shard.receiver.stream_began(8)
    shard.note(shard.receiver.unreadable(8, NONSENSE))
    assert shard.fault(8).reason is Reason.BAD_REQUEST
    assert shard.events == []


def test_what_is_no_message_fails_the_transfer() -> None:
    shard = Shard()
    stream = shard.stream()
    shard.note(shard.receiver.unreadable(stream, NONSENSE))
    assert shard.told().code is Code.INTERNAL


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ref": types_pb2.TransferRef(transfer_id="t", attempt=1)}, Reason.STALE_EPOCH),
        (
            {"ref": types_pb2.TransferRef(transfer_id="x", attempt=1, decode_epoch=EPOCH)},
            Reason.NOT_OWNER,
        ),
        ({"transport": layout_pb2.TRANSPORT_SHM}, Reason.FEATURE),
        ({"transport": 99}, Reason.FEATURE),
        ({"kv_format": "own"}, Reason.FEATURE),
        ({"shard_index": 1}, Reason.BAD_REQUEST),
    ],
)
def test_an_open_that_means_something_else_is_refused_and_harms_nothing(
    fields: dict[str, Any], reason: Reason
) -> None:
    shard = Shard()
    good = shard.stream()
    bad = shard.stream(**fields)
    assert shard.fault(bad).reason is reason
    shard.everything(good)
    shard.end(good, 2, 8 * LAYER)
    assert shard.ends[good] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_size", 2),
        ("tp_rank", 1),
        ("pp_rank", 1),
        ("layer_start", 1),
        ("layer_count", 1),
        ("head_start", 1),
        ("head_count", 99),
    ],
)
def test_a_sender_that_is_not_the_only_one_is_none_of_them(field: str, value: int) -> None:
    shard = Shard()
    bad = shard.stream(sender=layout_pb2.Shard(**{field: value}))  # type: ignore[arg-type]
    assert shard.fault(bad).reason is Reason.BAD_REQUEST
    assert [each.field for each in shard.fault(bad).fields] == ["open.sender"]
    assert shard.events == []


@pytest.mark.parametrize(("field", "value"), [("dp_size", 2), ("dp_rank", 1), ("cp_rank", 1)])
def test_a_sender_that_shares_more_is_refused_by_the_field(field: str, value: int) -> None:
    shard = Shard()
    bad = shard.stream(sender=layout_pb2.Shard(**{field: value}))  # type: ignore[arg-type]
    assert shard.fault(bad).reason is Reason.FEATURE
    assert shard.fault(bad).metadata == {"feature": f"open.sender.{field}"}
    assert shard.events == []


def test_a_sender_that_counts_all_it_holds_is_the_only_one() -> None:
    shard = Shard()
    layers = sum(group.layers for group in LAYOUT.groups)
    heads = LAYOUT.groups[0].planes[0].heads
    whole = layout_pb2.Shard(tp_size=1, dp_size=1, layer_count=layers, head_count=heads)
    assert shard.stream(sender=whole) not in shard.ends


def test_only_the_runs_that_are_wanted_are_let_in() -> None:
    shard = Shard(grant=False)
    table = [6, 3, 5, 1, 7]
    shard.buffer[:] = b"\x5a" * len(shard.buffer)
    shard.note(shard.receiver.open_grant("g", KEY, OWNER, table, [(1, 2), (4, 1)]))
    stream = shard.stream()
    assert not shard.responses[stream][0].opened.verified
    for layers, group in ((3, 0), (1, 1)):
        shard.chunk(stream, (1, 2), (0, layers), group=group)
        shard.chunk(stream, (4, 1), (0, layers), group=group)
    shard.end(stream, 4, 12 * LAYER)
    assert shard.ends == {stream: None}
    for block in {0, 2, 4, 6, 1}:
        at = block * LAYOUT.block_bytes
        assert set(shard.buffer[at : at + LAYOUT.block_bytes]) == {0x5A}, "a neighbour's"


@pytest.mark.parametrize("blocks", [(0, 1), (0, 2), (2, 2), (3, 1), (3, 2), (1, 4), (5, 1)])
def test_a_chunk_that_leaves_the_wanted_runs_fails_the_transfer(blocks: tuple[int, int]) -> None:
    shard = Shard(grant=False)
    shard.note(shard.receiver.open_grant("g", KEY, OWNER, [6, 3, 5, 1, 7], [(1, 2), (4, 1)]))
    stream = shard.stream()
    shard.chunk(stream, blocks, (0, 3))
    assert shard.fault(stream).reason is Reason.BAD_REQUEST
    assert "[1, 3), [4, 5)" in shard.fault(stream).fields[0].description
    assert shard.told().code is Code.INTERNAL
    assert not any(shard.buffer)


def test_where_nothing_is_wanted_the_end_is_all_there_is() -> None:
    shard = Shard(grant=False)
    shard.note(shard.receiver.open_grant("g", KEY, OWNER, [6, 3], []))
    stream = shard.stream()
    shard.end(stream, 0, 0)
    assert shard.ends == {stream: None}
    assert shard.events == [ev.ReceiveStarted("g"), ev.ReceiveCompleted("g")]


def test_a_reopened_stream_is_told_the_runs_that_came_and_no_other() -> None:
    shard = Shard(grant=False)
    shard.note(shard.receiver.open_grant("g", KEY, OWNER, [6, 3, 5, 1, 7], [(1, 2), (4, 1)]))
    first = shard.stream()
    shard.chunk(first, (1, 1), (0, 1))
    shard.chunk(first, (4, 1), (0, 1))
    shard.gone(first)
    assert shard.verified(shard.stream()) == [(0, 0, 1, 1), (0, 0, 4, 1)]
