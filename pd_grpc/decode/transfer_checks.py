"""What a shard takes from a sender, and how it says what is wrong."""

from __future__ import annotations

from collections.abc import Container, Sequence

from pd_grpc.protocol.faults import Fault, Reason, bad_request, not_meant
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.messages import plain_transport as plain
from pd_grpc.protocol.messages import transport_name
from pd_grpc.protocol.refs import name_errors, ref_errors
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.protocol.shards import Part, unbuilt_part
from pd_grpc.v1 import transfer_pb2


def check_open(
    message: transfer_pb2.TransferOpen,
    decode_epoch: int,
    shard: int,
    transports: Container[int],
) -> None:
    """Fault when it is malformed, means another process or another shard than `shard`, or asks for
    what is not built or, of `transports`, not there."""
    wrong = ref_errors(message.ref, "open.ref")
    wrong += name_errors(message.grant_id, "open.grant_id", required=True)
    if wrong:
        raise bad_request(wrong)
    if message.ref.decode_epoch != decode_epoch:
        text = "the transfer means another process of this decode instance"
        raise not_meant(Reason.STALE_EPOCH, text, message.ref.decode_epoch, decode_epoch)
    if plain(message.transport) not in transports:
        raise wrong_transport(message.transport)
    unbuilt = unbuilt_part(message.sender)
    if unbuilt is not None:
        text = f"a sender with {unbuilt.field} {unbuilt.theirs} is not supported"
        raise Fault(Reason.FEATURE, text, {"feature": f"open.sender.{unbuilt.field}"})
    if message.shard_index != shard:
        raise bad_request([FieldError("open.shard_index", f"must be {shard}: this is that shard")])


def check_range(
    chunk: transfer_pb2.KvChunk,
    payload_bytes: int,
    layout: KvLayout,
    part: Part,
    wanted: Sequence[tuple[int, int]],
) -> None:
    """Fault when a chunk's ranges are not within `part` of the layout and one of the `wanted` runs
    (start, count) of blocks, its heads not those of `part`, or its payload has not their size."""
    wrong = []
    if chunk.group >= len(layout.groups):
        wrong.append(FieldError("chunk.group", f"there are {len(layout.groups)}"))
        raise bad_request(wrong)
    held = [(layer, layers) for group, layer, layers in part.runs(layout) if group == chunk.group]
    layer, layers = held[0] if held else (0, 0)
    layer_end = chunk.layer_start + chunk.layer_count
    if chunk.layer_count < 1 or chunk.layer_start < layer or layer_end > layer + layers:
        text = f"of the group the layers [{layer}, {layer + layers}) come on this stream"
        wrong.append(FieldError("chunk.layer_start", text))
    heads = chunk.head_start, chunk.head_count
    if heads not in ((0, 0), (part.head, part.heads)):
        text = f"the heads [{part.head}, {part.head + part.heads}) come on this stream"
        wrong.append(FieldError("chunk.head_start", text))
    first, end = chunk.block_start, chunk.block_start + chunk.block_count
    inside = any(start <= first and end <= start + count for start, count in wanted)
    if chunk.block_count < 1 or not inside:
        runs = ", ".join(f"[{start}, {start + count})" for start, count in wanted) or "none"
        wrong.append(FieldError("chunk.block_start", f"of the blocks {runs} are wanted"))
    size = range_bytes(chunk, layout, part)
    # Bytes that lie elsewhere have the size of their ranges; whether they may is the transport's.
    if payload_bytes != size and not chunk.HasField("descriptor"):
        text = f"has {payload_bytes} bytes; the ranges take {size}"
        wrong.append(FieldError("chunk.payload", text))
    if wrong:
        raise bad_request(wrong)


def range_bytes(chunk: transfer_pb2.KvChunk, layout: KvLayout, part: Part) -> int:
    """Bytes that a chunk's ranges take, with the heads of `part`."""
    return chunk.layer_count * chunk.block_count * part.layer_bytes(layout, chunk.group)


def wrong_transport(transport: int) -> Fault:
    """A stream by another transport than its grant's."""
    text = f"{transport_name(transport)} is not supported"
    return Fault(Reason.FEATURE, text, {"feature": "open.transport"})


def wrong_format(kv_format: str, granted: str) -> Fault:
    """A stream of bytes in another format than its grant's."""
    text = f"format {kv_format} is not supported: the grant's is {granted}"
    return Fault(Reason.FEATURE, text, {"feature": "open.kv_format"})


def overlaps(chunk: transfer_pb2.KvChunk) -> Fault:
    """A chunk whose ranges were partly sent before, in another."""
    text = "overlaps ranges that were sent before without being equal to one of them"
    return bad_request([FieldError("chunk.block_start", text)])


def check_window(unacknowledged: int, payload_bytes: int, window_bytes: int) -> None:
    """Fault when a sender goes on beyond its window: what it knows to be unacknowledged is never
    less than what is so here. A chunk alone may be larger than the window."""
    reached = unacknowledged + payload_bytes
    if unacknowledged and reached > window_bytes:
        text = f"{reached} bytes would be unacknowledged; the window is {window_bytes}"
        raise bad_request([FieldError("chunk.payload", text)])
