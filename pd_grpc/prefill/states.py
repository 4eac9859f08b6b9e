"""What a request is on P: its states, the one table of their transitions, and its record."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pd_grpc.blocks.pool import Holding
from pd_grpc.engine.base import Sampled
from pd_grpc.engine.stopping import Finish
from pd_grpc.prefill.strands import Strand
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.layout import CANONICAL
from pd_grpc.protocol.messages import prompt_digest
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import layout_pb2, prefill_pb2, types_pb2


class PrefillState(enum.Enum):
    """Where a request stands on P; the values are those of the protocol's TransferState."""

    QUEUED = types_pb2.TRANSFER_STATE_QUEUED
    """Waits to be prepared: for a session with D, or for its turn to ask."""
    ALLOCATING = types_pb2.TRANSFER_STATE_ALLOCATING
    """An Allocate is in flight."""
    PREPARED = types_pb2.TRANSFER_STATE_PREPARED
    """D has granted blocks; it waits for the engine and holds no block of P's."""
    COMPUTING = types_pb2.TRANSFER_STATE_COMPUTING
    """Its chunks go through the engine; KV is already being sent."""
    SENDING = types_pb2.TRANSFER_STATE_SENDING
    """Computed; D has not yet confirmed both the KV and the first token."""
    HANDED_OFF = types_pb2.TRANSFER_STATE_HANDED_OFF
    """D owns it."""
    FAILED = types_pb2.TRANSFER_STATE_FAILED
    """A fault ended it."""
    CANCELLED = types_pb2.TRANSFER_STATE_CANCELLED
    """Its caller left."""

    @property
    def terminal(self) -> bool:
        """Whether nothing can follow."""
        return not TRANSITIONS[self]

    @property
    def wire(self) -> types_pb2.TransferState:
        """As the protocol names it."""
        return self.value


_ENDS = frozenset({PrefillState.FAILED, PrefillState.CANCELLED})

TRANSITIONS: Mapping[PrefillState, frozenset[PrefillState]] = {
    PrefillState.QUEUED: _ENDS | {PrefillState.ALLOCATING},
    # Back to QUEUED when it turns to an alternate D.
    PrefillState.ALLOCATING: _ENDS | {PrefillState.QUEUED, PrefillState.PREPARED},
    PrefillState.PREPARED: _ENDS | {PrefillState.COMPUTING},
    PrefillState.COMPUTING: _ENDS | {PrefillState.SENDING},
    PrefillState.SENDING: _ENDS | {PrefillState.HANDED_OFF},
    PrefillState.HANDED_OFF: frozenset(),
    PrefillState.FAILED: frozenset(),
    PrefillState.CANCELLED: frozenset(),
}


@dataclass(frozen=True)
class Grant:
    """What D granted: where to send which logical blocks, and under which name."""

    endpoint: str
    decode: types_pb2.Instance
    grant_id: str
    wanted: tuple[tuple[int, int], ...]
    """Runs of logical blocks, (start, count), ascending."""
    shards: tuple[layout_pb2.Shard, ...]
    transport: layout_pb2.Transport
    cached_tokens: int = 0
    """Tokens that D says it has the KV of."""
    strands: tuple[Strand, ...] = ()
    """Which shard of ours sends what to which of D's; streams are known by their place here."""
    kv_format: str = CANONICAL
    """Of the bytes that travel."""


class Stream(enum.Enum):
    """A strand's Transfer, as the control side knows it. P's blocks are in use while it is OPEN,
    BROKEN or CLOSING."""

    OPEN = "open"
    BROKEN = "broken"
    """Ended without a word of D's; to be reopened."""
    CLOSING = "closing"
    """Asked to stop; the bulk side has not confirmed it."""
    COMPLETED = "completed"
    CLOSED = "closed"

    @property
    def uses_blocks(self) -> bool:
        """Whether the bulk side may still read P's blocks."""
        return self in (Stream.OPEN, Stream.BROKEN, Stream.CLOSING)


@dataclass
class Times:
    """When what happened, seconds of the machine's clock; None while it has not."""

    called: float
    first_allocate: float | None = None
    allocate: float | None = None
    """When the Allocate that is in flight, or was granted, went out."""
    granted: float | None = None
    compute: float | None = None
    first_token: float | None = None
    """When the first token was known."""
    first_token_answered: float | None = None
    kv_acked: float | None = None
    """When D last acknowledged KV."""
    ended: float | None = None


@dataclass
class PrefillRecord:
    """One request on P. Only the machine's parts change it."""

    key: TransferKey
    call: int
    request: prefill_pb2.PrefillRequest
    sampling: Sampling
    tokens: tuple[int, ...]
    """Prompt and generated tokens: what is computed and sent."""
    chain: BlockChain
    """Names the blocks of `tokens`."""
    deadline: float
    times: Times
    state: PrefillState = PrefillState.QUEUED
    state_since: float = 0.0
    choice: int = 0
    """Index into request.decodes of the D that is asked or has granted."""
    ask: int = 0
    """Number of the last Allocate, from 1; tells answers apart."""
    asking: bool = False
    asked_session: str = ""
    """The session id that the last Allocate carried."""
    asked_epoch: int = 0
    """Epoch of the D that the last Allocate meant."""
    grant: Grant | None = None
    transport: int = 0
    """By which its KV goes, once a stream was opened; unspecified before, and for inline."""
    holding: Holding | None = None
    in_step: bool = False
    """Whether the engine's present step writes into its blocks."""
    computed: int = 0
    """Tokens whose KV is in its blocks: computed, or found there."""
    cached_tokens: int = 0
    """Of those, the ones that were found in P's own prefix cache."""
    kept_blocks: int = 0
    """Blocks from the front that the prefix cache knows, or equal to some that it knows."""
    streams: dict[int, Stream] = field(default_factory=dict)
    acked_bytes: dict[int, int] = field(default_factory=dict)
    """By strand."""
    lost: dict[int, Fault | None] = field(default_factory=dict)
    """By strand, of those whose stream has broken: what the request fails with if none comes back,
    its connection's end; None for D's silence."""
    silent_since: dict[int, float] = field(default_factory=dict)
    """By strand, when the first stream broke after which its shard has acknowledged nothing, or the
    last one on which nothing was owed."""
    first_token: Sampled | None = None
    finish: Finish | None = None
    first_token_tries: int = 0
    first_token_in_flight: bool = False
    first_token_session: str = ""
    """The session id that the last SendFirstToken carried."""
    first_token_until: float | None = None
    """When D is given up, once a SendFirstToken was lost in this session."""
    first_token_delivered: bool = False
    may_land: bool = False
    """Whether a stream has ended of which P does not know that it has stopped."""
    stop_told: bool = False
    """Whether D has been told, or need not be, that nothing more is written to its blocks."""
    fault: Fault | None = None

    @property
    def target(self) -> prefill_pb2.DecodeTarget:
        """The D that it turns to."""
        return self.request.decodes[self.choice]

    @cached_property
    def prompt_digest(self) -> bytes:
        """Of `tokens`; made once, however many Ds are asked."""
        return prompt_digest(self.tokens)

    @property
    def max_new_tokens(self) -> int:
        """Tokens that may still be generated, the first included."""
        return self.sampling.max_tokens - len(self.request.generated_token_ids)

    @property
    def most_tokens(self) -> int:
        """Prompt and output together, at the most."""
        return len(self.tokens) + self.max_new_tokens

    @property
    def kv_needed(self) -> bool:
        """Whether D can need the KV: not when one token is all that may follow."""
        return self.max_new_tokens > 1

    @property
    def blocks_in_use(self) -> bool:
        """Whether the engine or the bulk side may still touch its blocks."""
        return self.in_step or any(stream.uses_blocks for stream in self.streams.values())

    def left(self, now: float) -> float:
        """What is left of its budget, in seconds."""
        return max(0.0, self.deadline - now)
