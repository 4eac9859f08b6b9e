"""What D's machine asks its shell to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pd_grpc.decode.states import DecodeState
from pd_grpc.engine.base import DecodeSlot, PrefillChunk
from pd_grpc.engine.stopping import Finish
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.layout import CANONICAL
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.shards import Place
from pd_grpc.v1 import decode_pb2, layout_pb2, types_pb2

if TYPE_CHECKING:  # a transfer holds what it has yet to emit
    from pd_grpc.decode.transfer import Ended, Owner

UnaryAnswer: TypeAlias = (
    decode_pb2.AllocateResponse | decode_pb2.SendFirstTokenResponse | decode_pb2.ReleaseResponse
)


@dataclass(frozen=True)
class Answer:
    """Answer a unary call."""

    call: int
    message: UnaryAnswer


@dataclass(frozen=True)
class Refuse:
    """End a call, unary or Generate, with a fault."""

    call: int
    fault: Fault


@dataclass(frozen=True)
class SessionSend:
    """Send to a P on its session."""

    stream: int
    message: decode_pb2.SessionResponse


@dataclass(frozen=True)
class SessionEnd:
    """End a session's stream, with a fault or cleanly."""

    stream: int
    fault: Fault | None


@dataclass(frozen=True)
class TokenOut:
    """One token for a client."""

    token_id: int
    logprobs: types_pb2.PositionLogprobs | None = None


@dataclass(frozen=True)
class Emit:
    """Show tokens to a client."""

    call: int
    tokens: tuple[TokenOut, ...]


@dataclass(frozen=True)
class FinishGenerate:
    """End a client's leg: the answer is complete. `timings` only where D prefilled it itself."""

    call: int
    reason: Finish
    usage: types_pb2.Usage
    timings: types_pb2.Timings | None = None


@dataclass(frozen=True)
class OpenReceive:
    """Let KV in for a grant, on every shard: `blocks[i]` is the physical block of logical block
    `i`, and the runs (start, count) `wanted` of logical blocks are to come, from `owner` alone, by
    `transport` or inline, from its shards `senders`, without any from one that holds everything, in
    `kv_format` or canonical. The other blocks hold their KV already and are not to be written
    to."""

    grant_id: str
    key: TransferKey
    owner: Owner
    blocks: tuple[int, ...]
    wanted: tuple[tuple[int, int], ...]
    transport: int = layout_pb2.TRANSPORT_INLINE
    senders: tuple[Place, ...] = ()
    kv_format: str = CANONICAL


@dataclass(frozen=True)
class CloseReceive:
    """Let no more KV in for a grant, on every shard, tell its streams why, and report a
    `ReceiveClosed` of each shard."""

    grant_id: str
    fault: Fault


@dataclass(frozen=True)
class AdmitSession:
    """Let KV streams with this session id in: it is the newest of `owner`. Comes before P can know
    the id."""

    owner: Owner
    session_id: str


@dataclass(frozen=True)
class DismissPrefill:
    """Let no KV stream of `owner` in any more."""

    owner: Owner


@dataclass(frozen=True)
class StepPlan:
    """One step of the engine; grants name whose chunk and slot each is."""

    step: int
    prefill_grants: tuple[str, ...]
    prefill: tuple[PrefillChunk, ...]
    decode_grants: tuple[str, ...]
    decode: tuple[DecodeSlot, ...]

    @property
    def block_tables(self) -> tuple[Sequence[int], ...]:
        """Of the chunks, then of the slots."""
        chunks = (chunk.block_table for chunk in self.prefill)
        return (*chunks, *(slot.block_table for slot in self.decode))


@dataclass(frozen=True)
class RunStep:
    """Run a step and report it."""

    plan: StepPlan


@dataclass(frozen=True)
class Changed:
    """A transfer moved from one state to another; `before` is None when it is new, `ended` is there
    at its end."""

    key: TransferKey
    before: DecodeState | None
    after: DecodeState
    fault: Fault | None
    ended: Ended | None = None


@dataclass(frozen=True)
class SetReady:
    """Turn readiness on or off."""

    ready: bool
    reason: str


@dataclass(frozen=True)
class Drained:
    """Nothing is in flight any more and nothing new is taken."""


ToReceiver: TypeAlias = OpenReceive | CloseReceive | AdmitSession | DismissPrefill
"""For the shards that let KV in."""

Action: TypeAlias = (
    Answer
    | Refuse
    | SessionSend
    | SessionEnd
    | Emit
    | FinishGenerate
    | ToReceiver
    | RunStep
    | Changed
    | SetReady
    | Drained
)
