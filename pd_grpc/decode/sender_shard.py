"""The shards of P as one shard of D takes them in: who sends, and what comes on a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pd_grpc.protocol.faults import bad_request
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.protocol.shards import NOTHING, Part, Place, part_of, place_of
from pd_grpc.v1 import layout_pb2, transfer_pb2


def sender_index(
    message: transfer_pb2.TransferOpen, senders: Sequence[Place], layout: KvLayout
) -> int:
    """Which of P's shards sends. Fault when it is none of them."""
    if not message.HasField("sender"):
        if len(senders) > 1:
            text = f"must be set: the session has {len(senders)} shards"
            raise bad_request([FieldError("open.sender", text)])
        return 0
    sender = place_of(message.sender, layout)
    if sender not in senders:
        text = f"{sender} with {_show(sender.part)} is none of the session's shards"
        raise bad_request([FieldError("open.sender", text)])
    return senders.index(sender)


def part_sent(
    message: transfer_pb2.TransferOpen,
    common: Part,
    others: Iterable[Part],
    layout: KvLayout,
) -> Part:
    """What comes on a stream of which sender and receiver have `common`, beside what `others`
    bring. Fault when it may not."""
    if not common.area:
        text = "the sender has nothing in common with this shard"
        raise bad_request([FieldError("open.shard_index", text)])
    if not message.HasField("sends"):
        part = common
    elif message.sends.layer_count:
        part = part_of(message.sends, layout)
        if not part.within(common):
            text = f"{_show(part)}: the two shards have {_show(common)} in common"
            raise bad_request([FieldError("open.sends", text)])
    elif message.sends != layout_pb2.KvPart():
        raise bad_request([FieldError("open.sends", "of no layers the other fields must be 0")])
    else:
        return NOTHING
    if any(part.common(other).area for other in others):
        text = f"some of {_show(part)} comes on another stream of this grant"
        raise bad_request([FieldError("open.sends", text)])
    return part


def _show(part: Part) -> str:
    layers = f"layers [{part.layer}, {part.layer + part.layers})"
    return f"{layers}, heads [{part.head}, {part.head + part.heads})"
