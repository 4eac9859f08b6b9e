"""The KV of one grant on its way to one shard: which shards of P bring what, and what has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_grpc.decode.coverage import Coverage, first_lacking, wanted_of
from pd_grpc.decode.sender_shard import part_sent, sender_index
from pd_grpc.decode.transfer import Owner
from pd_grpc.decode.transfer_checks import wrong_format
from pd_grpc.protocol.faults import bad_request
from pd_grpc.protocol.layout import CANONICAL, KvLayout
from pd_grpc.protocol.messages import INLINE
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.protocol.shards import Part, Place, whole
from pd_grpc.v1 import transfer_pb2


@dataclass
class Incoming:
    """What one shard of P brings of a grant, over all its streams, the last of which is `stream`
    while it is open. `missing` are the layers of blocks that have not come."""

    part: Part
    verified: Coverage
    missing: int
    stream: int | None = None
    ended: bool = False


@dataclass
class IncomingGrant:
    """A grant on a shard that holds `part`. Only the shards of P that have something in common with
    it are `expected`: so many must end."""

    key: TransferKey
    owner: Owner
    blocks: tuple[int, ...]
    wanted: tuple[tuple[int, int], ...]
    senders: tuple[Place, ...]
    layout: KvLayout
    part: Part
    transport: int
    audited: bool
    kv_format: str = CANONICAL
    incoming: dict[int, Incoming] = field(default_factory=dict)
    """By the sender's place in `senders`."""
    sent_started: bool = False
    completed: bool = False

    def __post_init__(self) -> None:
        self.senders = self.senders or (Place(whole(self.layout)),)
        self.expected = sum(1 for place in self.senders if place.part.common(self.part).area)

    @property
    def missing(self) -> int:
        """Heads of layers of blocks that have not come, whoever is to bring them."""
        blocks = sum(count for _, count in self.wanted)
        found = self.incoming.values()
        came = sum(each.part.area * blocks - each.missing * each.part.heads for each in found)
        return self.part.area * blocks - came

    def _check_format(self, message: transfer_pb2.TransferOpen) -> None:
        kv_format = message.kv_format or CANONICAL
        converted = kv_format == CANONICAL and message.transport in INLINE
        if kv_format != self.kv_format and not converted:
            raise wrong_format(kv_format, self.kv_format)

    def streams(self) -> Sequence[int]:
        """Those that are open."""
        return [each.stream for each in self.incoming.values() if each.stream is not None]

    def opened(self, message: transfer_pb2.TransferOpen) -> Incoming:
        """What comes on a stream that `message` opens. Fault when it may not."""
        self._check_format(message)
        index = sender_index(message, self.senders, self.layout)
        common = self.senders[index].part.common(self.part)
        others = [each.part for i, each in self.incoming.items() if i != index]
        part = part_sent(message, common, others, self.layout)
        known = self.incoming.get(index)
        if known is None:
            lacking = wanted_of(self.layout, part, len(self.blocks), self.wanted)
            known = self.incoming[index] = Incoming(part, *lacking)
        elif known.part != part:
            text = "an earlier stream of the same two shards brought something else"
            raise bad_request([FieldError("open.sends", text)])
        return known

    def end(self, incoming: Incoming) -> bool:
        """One of P's shards has sent everything; whether all have. Fault when that is not so."""
        if incoming.missing:
            first = first_lacking(incoming.verified)
            text = f"{incoming.missing} layers of blocks have not come: {first}"
            raise bad_request([FieldError("end", text)])
        ended = sum(1 for each in self.incoming.values() if each.ended or each is incoming)
        if ended == self.expected:
            lacks = self.part.area - sum(each.part.area for each in self.incoming.values())
            if lacks:
                text = f"{lacks} heads of layers of this shard come on no stream"
                raise bad_request([FieldError("end", text)])
        incoming.ended = True
        return ended == self.expected
