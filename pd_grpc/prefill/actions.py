"""Everything the machine can ask of its shells. They are to be carried out in order."""

from __future__ import annotations

from dataclasses import dataclass

from pd_grpc.engine.base import PrefillChunk
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import SendPlan
from pd_grpc.v1 import decode_pb2, prefill_pb2, transfer_pb2


@dataclass(frozen=True)
class Emit:
    """Send a message to the caller of a Prefill."""

    call: int
    response: prefill_pb2.PrefillResponse


@dataclass(frozen=True)
class FinishCall:
    """End a Prefill call with OK."""

    call: int


@dataclass(frozen=True)
class FailCall:
    """End a Prefill call with a fault's status."""

    call: int
    fault: Fault


@dataclass(frozen=True)
class OpenSession:
    """Open session stream number `link` to D and say hello."""

    endpoint: str
    link: int
    hello: decode_pb2.Hello


@dataclass(frozen=True)
class SendOnSession:
    """Send a message on session stream number `link`."""

    endpoint: str
    link: int
    message: decode_pb2.SessionRequest


@dataclass(frozen=True)
class CloseSession:
    """End session stream number `link`. `graceful` half-closes it and lets D end it; otherwise it
    is cancelled. No event of it is awaited any more."""

    endpoint: str
    link: int
    graceful: bool


@dataclass(frozen=True)
class ForgetDecode:
    """Nothing is left to do with D: its channels may be closed."""

    endpoint: str


@dataclass(frozen=True)
class SendAllocate:
    """Call Allocate; `link` is the session's stream, so that a new session means a new connection.
    Answered by AllocateAnswered with the same `ask`."""

    key: TransferKey
    ask: int
    endpoint: str
    link: int
    request: decode_pb2.AllocateRequest
    timeout_s: float


@dataclass(frozen=True)
class CancelAllocate:
    """Cancel Allocate number `ask` to the D at `endpoint`; nobody waits for its answer."""

    key: TransferKey
    ask: int
    endpoint: str


@dataclass(frozen=True)
class OpenTransfer:
    """Open a stream to one shard of D, from our shard `sender`, and send what `plan` says as it is
    computed. When the transfer is known already, open it again with the new `open` message and
    resend what D lacks. `strand` is its place in `Grant.strands`, `decode` is D's control endpoint,
    `endpoint` the shard's."""

    key: TransferKey
    strand: int
    decode: str
    endpoint: str
    open: transfer_pb2.TransferOpen
    plan: SendPlan
    progress_s: float
    timeout_s: float
    sender: int = 0


@dataclass(frozen=True)
class CloseTransfer:
    """Stop sending over one strand; confirmed by TransferClosed."""

    key: TransferKey
    strand: int


@dataclass(frozen=True)
class RunStep:
    """Run one prefill step on the engine thread; `keys` and `chunks` belong together. Answered by
    StepDone or StepFailed."""

    step: int
    keys: tuple[TransferKey, ...]
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True)
class SendFirstToken:
    """Call SendFirstToken; answered by FirstTokenAnswered with the same `attempt`."""

    key: TransferKey
    attempt: int
    endpoint: str
    request: decode_pb2.SendFirstTokenRequest
    timeout_s: float


@dataclass(frozen=True)
class SendRelease:
    """Call Release; answered by ReleaseAnswered with the same `call`."""

    key: TransferKey
    call: int
    endpoint: str
    request: decode_pb2.ReleaseRequest
    timeout_s: float


@dataclass(frozen=True)
class Changed:
    """A request has entered another state, for those who watch and for spans. `before` is None
    for one that was just taken in, `fault` is set with FAILED and CANCELLED; `computed` are the
    tokens that the engine has been through, without those that were found in the prefix cache."""

    key: TransferKey
    call: int
    before: PrefillState | None
    after: PrefillState
    fault: Fault | None = None
    computed: int = 0


@dataclass(frozen=True)
class EngineStuck:
    """The engine's step has lasted too long: readiness off."""

    fault: Fault


@dataclass(frozen=True)
class EngineAlive:
    """The step that was stuck has ended after all: readiness on."""


@dataclass(frozen=True)
class SenderStuck:
    """The bulk side has been silent too long: readiness off."""

    fault: Fault


@dataclass(frozen=True)
class SenderAlive:
    """The bulk side has said something after all: readiness on."""


@dataclass(frozen=True)
class Superseded:
    """A newer process of this name exists: readiness off, and drain."""

    fault: Fault


@dataclass(frozen=True)
class Drained:
    """Nothing is in flight any more, and nothing new is taken."""


Action = (
    Emit
    | FinishCall
    | FailCall
    | OpenSession
    | SendOnSession
    | CloseSession
    | ForgetDecode
    | SendAllocate
    | CancelAllocate
    | OpenTransfer
    | CloseTransfer
    | RunStep
    | SendFirstToken
    | SendRelease
    | Changed
    | EngineStuck
    | EngineAlive
    | SenderStuck
    | SenderAlive
    | Superseded
    | Drained
)
