"""What can happen to D. Calls and streams are named by numbers that the shell gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pd_grpc.engine.base import Sampled
from pd_grpc.protocol.faults import Fault
from pd_grpc.v1 import decode_pb2, inference_pb2

if TYPE_CHECKING:  # a transfer holds actions, whose shells feed events
    from pd_grpc.decode.transfer import Owner


@dataclass(frozen=True)
class HelloReceived:
    """A P opened a session on `stream`."""

    stream: int
    hello: decode_pb2.Hello


@dataclass(frozen=True)
class HeartbeatReceived:
    """A P lives."""

    stream: int
    heartbeat: decode_pb2.Heartbeat


@dataclass(frozen=True)
class GoodbyeReceived:
    """A P leaves on purpose."""

    stream: int


@dataclass(frozen=True)
class SessionStreamEnded:
    """A session's stream is gone; nobody knows why."""

    stream: int


@dataclass(frozen=True)
class AllocateCalled:
    """A P asks for blocks. `objection` is what the engine has against a request that has no other
    fault."""

    call: int
    request: decode_pb2.AllocateRequest
    objection: Fault | None = None


@dataclass(frozen=True)
class AllocateCallEnded:
    """The caller of an Allocate no longer waits."""

    call: int


@dataclass(frozen=True)
class FirstTokenCalled:
    """A P hands over the first token."""

    call: int
    request: decode_pb2.SendFirstTokenRequest


@dataclass(frozen=True)
class ReleaseCalled:
    """A P gives a transfer back."""

    call: int
    request: decode_pb2.ReleaseRequest


@dataclass(frozen=True)
class GenerateCalled:
    """A client's leg came, with what is left of its time in seconds. `objection` is what the engine
    has against a request that has no other fault."""

    call: int
    request: inference_pb2.GenerateRequest
    budget_s: float
    objection: Fault | None = None


@dataclass(frozen=True)
class GenerateCallEnded:
    """A client's leg is gone."""

    call: int


@dataclass(frozen=True)
class ReceiveStarted:
    """A first stream to a shard for a grant is open."""

    grant_id: str
    shard: int = 0


@dataclass(frozen=True)
class ReceiveProgress:
    """Chunks were written and verified; `payload_bytes` of them."""

    grant_id: str
    payload_bytes: int
    shard: int = 0


@dataclass(frozen=True)
class ReceiveCompleted:
    """Every wanted block of every layer of a shard is verified, and nothing more will be written
    there."""

    grant_id: str
    shard: int = 0


@dataclass(frozen=True)
class ReceiveFailed:
    """What P sent cannot be used."""

    grant_id: str
    fault: Fault
    shard: int = 0


@dataclass(frozen=True)
class ReceiveClosed:
    """A shard has stopped writing to the blocks of a grant."""

    grant_id: str
    shard: int = 0


@dataclass(frozen=True)
class WriterAttached:
    """A process of P can write into the pool's memory."""

    owner: Owner


@dataclass(frozen=True)
class WriterGone:
    """It cannot any more: it has let go of the memory, or has ended, or the memory is lent to
    nobody."""

    owner: Owner


@dataclass(frozen=True)
class StepDone:
    """The engine's step returned: for each chunk and slot of the plan, in order, the token."""

    step: int
    prefilled: Sequence[Sampled | None]
    decoded: Sequence[Sampled]


@dataclass(frozen=True)
class StepFailed:
    """The engine's step raised."""

    step: int
    fault: Fault


@dataclass(frozen=True)
class OperatorReleased:
    """An operator ends a transfer by hand."""

    transfer_id: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class DrainRequested:
    """Take nothing new; what runs may take `deadline_s` more."""

    deadline_s: float


@dataclass(frozen=True)
class Leaving:
    """D is about to stop: nothing can go on."""


Event: TypeAlias = (
    HelloReceived
    | HeartbeatReceived
    | GoodbyeReceived
    | SessionStreamEnded
    | AllocateCalled
    | AllocateCallEnded
    | FirstTokenCalled
    | ReleaseCalled
    | GenerateCalled
    | GenerateCallEnded
    | ReceiveStarted
    | ReceiveProgress
    | ReceiveCompleted
    | ReceiveFailed
    | ReceiveClosed
    | WriterAttached
    | WriterGone
    | StepDone
    | StepFailed
    | OperatorReleased
    | DrainRequested
    | Leaving
)
