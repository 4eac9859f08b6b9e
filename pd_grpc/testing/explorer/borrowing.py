"""P's half of shm in the world: D's memory borrowed and given back, and writes that take time.

A write begins, and lands when the world says so: at once, or after anything else that may happen
meanwhile, also while its process was stopped. While it is under way the bulk loop does nothing
else. That of a server goes on, and lets only the end of that stream, and the next one, wait. Then
the chunk says that it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pd_grpc.prefill.carriers import Carriers
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explorer.wire import Message
from pd_grpc.transport.base import Slab
from pd_grpc.v1 import decode_pb2, layout_pb2, shm_pb2, transfer_pb2

if TYPE_CHECKING:
    from pd_grpc.testing.explorer.sending import Sending

SHM = layout_pb2.TRANSPORT_SHM
CARRIERS = Carriers((SHM, layout_pb2.TRANSPORT_INLINE), frozenset({SHM}))


class WriteInto(NamedTuple):
    """Bytes for D's memory, as the world carries them: of the process of D with this epoch, in
    whose name (its grant), and for which of its physical blocks."""

    epoch: int
    grant_id: str
    places: tuple[int, ...]
    payload: bytes


@dataclass(eq=False)
class Attachment:
    """The memory of one process of D, mapped here; `call` is the connection it came by."""

    call: int
    epoch: int


@dataclass(frozen=True)
class Write:
    """A write that has begun and not landed."""

    key: TransferKey
    shard: int
    slab: Slab


class Reached(NamedTuple):
    """The memory of the D at the other end of a session is here, or cannot be had."""

    session: int
    got_there: bool


@dataclass
class Reaching:
    """A session whose welcome waits until the memory is here, and what D says after it."""

    welcome: Message
    until: float
    held: list[Message] = field(default_factory=list)


class Handshake(NamedTuple):
    """The memory of D's process `epoch` is asked for, for the sake of a session."""

    session: int
    server: str
    epoch: int


def welcome_of(message: Message) -> decode_pb2.Welcome | None:
    """The welcome in a session's message that P must get ready for by itself."""
    body = message.body
    if not isinstance(body, decode_pb2.SessionResponse):
        return None
    waits = body.WhichOneof("message") == "welcome" and body.welcome.transport == SHM
    return body.welcome if waits else None


def target_of(opened: transfer_pb2.TransferOpened) -> Mapping[int, int]:
    """D's physical block for each logical one that it grants."""
    runs = shm_pb2.ShmTarget.FromString(opened.target.handle).runs
    return {run.start + i: block for run in runs for i, block in enumerate(run.blocks)}


def still_to_write(sending: Sending) -> Iterator[int]:
    """The logical blocks that a stream that is open may begin to write."""
    sender = sending.sender
    if sending.call is None or not sender._open or sender._end_sent:
        return
    for layer in sender._layers:
        for place, state in enumerate(layer.state):
            if state == 0:
                yield sender._block_at(place)
