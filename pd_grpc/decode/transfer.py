"""One transfer as D keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_grpc.blocks.pool import Holding
from pd_grpc.decode.actions import TokenOut
from pd_grpc.decode.carrier import INLINE_CARRIER, Carrier
from pd_grpc.decode.states import STAGES, DecodeState
from pd_grpc.engine.penalties import Tally, tally
from pd_grpc.engine.stopping import Finish, StopRule
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import decode_pb2, types_pb2

_PREFILLING = (DecodeState.RESERVED, DecodeState.RECEIVING, DecodeState.PREEMPTED)


@dataclass(frozen=True)
class Owner:
    """The P process that a transfer belongs to until hand-off."""

    name: str
    epoch: int


@dataclass
class PrefillLeg:
    """What P said of a transfer: its Allocate, and which calls wait for the answer until when."""

    owner: Owner
    request: decode_pb2.AllocateRequest
    body: bytes
    calls: dict[int, float] = field(default_factory=dict)
    response: decode_pb2.AllocateResponse | None = None


@dataclass
class ClientLeg:
    """The client's Generate: its prompt, what it has already, and how to sample. `chain` names the
    blocks of its tokens."""

    call: int
    prompt: list[int]
    generated: list[int]
    sampling: Sampling
    stop: StopRule
    until: float
    chain: BlockChain


@dataclass
class Transfer:
    """A request on D. `grant_id` names it to engine and receiver from its birth on.

    `output` are the tokens chosen here or by P, without those the client had already. `kv_tokens`
    is how many leading tokens have their KV in the holding's blocks; of these blocks the first
    `kept_blocks` are known to the prefix cache, or equal to some that are. `cached_tokens` is how
    many leading tokens it found there when it was granted, `computed_tokens` how many P says it
    had to compute. `complete_shards` are D's shards that have all of their KV. `granted_at` is when
    it got its blocks, if it needs any. `computed_from` is when the first chunk of a local prefill
    entered the engine. `carrier` is how its KV comes. `tally` is what `tallied` counted last.
    `turn` is its place among all that this D's engine was ever given, the oldest first; 0 before.
    """

    key: TransferKey
    grant_id: str
    state: DecodeState
    created: float
    since: float
    budget_until: float
    request_id: str = ""
    prefill: PrefillLeg | None = None
    client: ClientLeg | None = None
    local: bool = False
    holding: Holding | None = None
    receiving: bool = False
    carrier: Carrier = INLINE_CARRIER
    first: decode_pb2.FirstToken | None = None
    complete_shards: set[int] = field(default_factory=set)
    kv_complete: bool = False
    kv_tokens: int = 0
    kept_blocks: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    computed_from: float | None = None
    output: list[int] = field(default_factory=list)
    tally: Tally | None = None
    turn: int = 0
    held: list[TokenOut] = field(default_factory=list)
    granted_at: float | None = None
    handed_off_at: float | None = None

    @property
    def max_new_tokens(self) -> int:
        """Tokens it may still be given, counted when it came here."""
        if self.prefill is not None:
            return self.prefill.request.max_new_tokens
        assert self.client is not None
        return self.client.sampling.max_tokens - len(self.client.generated)

    @property
    def written_to(self) -> bool:
        """Whether KV that a sender has may still land in its blocks. Only what completes the KV
        ends that: the sender's End, by which a one-sided writer says that it writes no more, while
        acknowledgements of every layer do not. Until then nothing of it is kept for others, and if
        the transfer ends before, its blocks are the quarantine's."""
        return self.receiving and not self.kv_complete

    @property
    def handed_off(self) -> bool:
        """Whether D owns it: it holds the verified KV and the first token."""
        return self.handed_off_at is not None

    @property
    def stage(self) -> str:
        """What it is doing, in the words of STAGE_DEADLINE."""
        if self.local and self.state in _PREFILLING and not self.handed_off:
            return "prefill"
        if self.state is DecodeState.READY and self.first is not None:
            return "attach"
        return STAGES[self.state]

    @property
    def tokens(self) -> list[int]:
        """Prompt, what the client had already, and output."""
        if self.client is None:
            return list(self.output)
        return self.client.prompt + self.client.generated + self.output

    @property
    def total_tokens(self) -> int:
        """The length of `tokens`, without making them: a prompt may have a million."""
        if self.client is None:
            return len(self.output)
        return len(self.client.prompt) + len(self.client.generated) + len(self.output)

    def tallied(self) -> Tally | None:
        """Of all its tokens so far, counting only those that are new; None where no penalty needs
        it."""
        client = self.client
        assert client is not None
        if not client.sampling.penalises:
            return None
        so_far = self.tally or tally(client.prompt, client.generated)
        for token_id in self.output[so_far.generated - len(client.generated) :]:
            so_far = so_far.followed_by(token_id)
        self.tally = so_far
        return so_far

    @property
    def spared_tokens(self) -> int:
        """Tokens of the prompt that were not computed for this answer, here or on P."""
        if self.local:
            spared = self.cached_tokens
        else:
            # P computes one at least; 0 is that of a P that does not say.
            prompt = 0 if self.prefill is None else self.prefill.request.prompt_tokens
            spared = prompt - self.computed_tokens if self.computed_tokens else 0
        return max(0, spared if self.client is None else min(spared, len(self.client.prompt)))

    @property
    def owner(self) -> Owner | None:
        """The P it belongs to, once an Allocate has come."""
        return None if self.prefill is None else self.prefill.owner


@dataclass(frozen=True)
class Ended:
    """What is remembered of a transfer that has ended.

    `undelivered` is an answer that P completed before the client's leg came.
    """

    state: DecodeState
    fault: Fault | None
    request_id: str
    created: float
    ended: float
    peer: str
    prompt_tokens: int
    generated_tokens: int
    undelivered: Undelivered | None = None


@dataclass(frozen=True)
class Undelivered:
    """A whole answer, one token long, waiting for its client."""

    token: TokenOut
    finish: Finish
    allocate: decode_pb2.AllocateRequest
    spared_tokens: int


def timings_of(transfer: Transfer) -> types_pb2.Timings | None:
    """Where the time before the first token went; None where a P computed it and knows better."""
    if transfer.computed_from is None or transfer.handed_off_at is None:
        return None
    return types_pb2.Timings(
        queue=duration(transfer.computed_from - transfer.created),
        compute=duration(transfer.handed_off_at - transfer.computed_from),
    )


def usage_of(prompt: Sequence[int], generated: int, spared: int) -> types_pb2.Usage:
    """Token counts of an answer. `spared` of the prompt's tokens came from a prefix cache."""
    return types_pb2.Usage(
        prompt_tokens=len(prompt),
        completion_tokens=generated,
        cached_tokens=min(spared, len(prompt)),
    )
