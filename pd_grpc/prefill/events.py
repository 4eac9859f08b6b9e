"""Everything that can happen to P: what the shells tell the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_grpc.engine.base import Sampled
from pd_grpc.prefill.actions import SendAllocate, SendRelease
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import Slab
from pd_grpc.v1 import decode_pb2, prefill_pb2, types_pb2

AnyFault = Fault | TransportFault


@dataclass(frozen=True)
class PrefillCalled:
    """A Prefill call has come. `call` is the shell's own number for it; `budget_s` the time the
    request may still take. `objection` is what the engine has against a request that has no other
    fault."""

    call: int
    request: prefill_pb2.PrefillRequest
    budget_s: float
    objection: Fault | None = None


@dataclass(frozen=True)
class PrefillCallEnded:
    """The caller of a Prefill has left: it cancelled, or its deadline passed."""

    call: int


@dataclass(frozen=True)
class SessionMessage:
    """D said something on the session stream number `link`."""

    endpoint: str
    link: int
    message: decode_pb2.SessionResponse


@dataclass(frozen=True)
class SessionBroken:
    """The session stream number `link` has ended; `fault` is None for an OK status."""

    endpoint: str
    link: int
    fault: AnyFault | None


@dataclass(frozen=True)
class TransportFailed:
    """The welcome on session stream number `link` chose a transport that does not get P there; it
    is not told otherwise, and nothing of that stream will be."""

    endpoint: str
    link: int
    transport: int
    why: str


@dataclass(frozen=True)
class AllocateAnswered:
    """The Allocate `asked` has ended: exactly one of `response` and `fault` is set."""

    asked: SendAllocate
    response: decode_pb2.AllocateResponse | None
    fault: AnyFault | None


@dataclass(frozen=True)
class StepDone:
    """The engine has finished a step; `results` are in the order of its chunks."""

    step: int
    results: Sequence[Sampled | None]


@dataclass(frozen=True)
class StepFailed:
    """The engine could not run a step."""

    step: int
    message: str


@dataclass(frozen=True)
class KvAcked:
    """A shard has acknowledged these slabs: `acked_bytes` of payload in all, over every stream."""

    key: TransferKey
    strand: int
    slabs: Sequence[Slab]
    acked_bytes: int


@dataclass(frozen=True)
class TransferReopened:
    """A stream that was opened again has reached its shard, which had nothing new to tell."""

    key: TransferKey
    strand: int


@dataclass(frozen=True)
class TransferCompleted:
    """A shard has everything that goes over a strand; the bulk side has dropped the transfer."""

    key: TransferKey
    strand: int


@dataclass(frozen=True)
class TransferBroken:
    """A shard's stream has ended before it was completed. The bulk side keeps the transfer until
    it is opened again or closed. `stopped` is as for `SendStream.close`."""

    key: TransferKey
    strand: int
    fault: AnyFault
    stopped: bool = True


@dataclass(frozen=True)
class TransferClosed:
    """The bulk side has dropped a transfer and will not touch its blocks again. `stopped` is as for
    `SendStream.close`, of every stream of the strand."""

    key: TransferKey
    strand: int
    stopped: bool = True


@dataclass(frozen=True)
class FirstTokenAnswered:
    """SendFirstToken number `attempt` of a request has ended: with D's state or with a fault."""

    key: TransferKey
    attempt: int
    state: types_pb2.TransferState | None
    fault: AnyFault | None


@dataclass(frozen=True)
class ReleaseAnswered:
    """The Release `sent` has ended; `fault` is None when D has taken the transfer back."""

    sent: SendRelease
    fault: AnyFault | None


@dataclass(frozen=True)
class OperatorRelease:
    """An operator ends a request by hand; `attempt` 0 means the newest."""

    transfer_id: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class DrainRequested:
    """Take nothing new; what runs may take `deadline_s` more."""

    deadline_s: float


@dataclass(frozen=True)
class PauseRequested:
    """Ask for nothing new and compute nothing new, or go on; what is in flight goes on anyway."""

    paused: bool


OfBulk = KvAcked | TransferReopened | TransferCompleted | TransferBroken | TransferClosed
"""What the bulk side says."""

Event = (
    PrefillCalled
    | PrefillCallEnded
    | SessionMessage
    | SessionBroken
    | TransportFailed
    | AllocateAnswered
    | StepDone
    | StepFailed
    | KvAcked
    | TransferReopened
    | TransferCompleted
    | TransferBroken
    | TransferClosed
    | FirstTokenAnswered
    | ReleaseAnswered
    | OperatorRelease
    | DrainRequested
    | PauseRequested
)
