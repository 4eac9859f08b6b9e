"""The whole contract between the protocol and an inference engine.

An engine owns a model and the memory of one block pool. It never decides who gets which block, when
a request runs or when it ends: the machines of `prefill/` and `decode/` do, and hand it batches.
All its methods but `close` are called from one thread, the engine thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.protocol.shards import Place, whole

if TYPE_CHECKING:  # The router reads this module too, and has no use for numpy.
    from pd_grpc.engine.grammar import Grammars
    from pd_grpc.engine.penalties import Tally


@dataclass(frozen=True)
class SampleSpec:
    """What the sampler needs to choose the next token of one request.

    `position` is where the chosen token will stand, counted from 0 over prompt and output.
    `generated` is how many tokens of output there are before it (for `min_tokens`). `tally` is of
    the tokens before it, where the sampling `penalises`. `output` are the tokens of output before
    it, where the answer follows a grammar.
    """

    sampling: Sampling
    position: int
    generated: int
    tally: Tally | None = None
    output: Sequence[int] = ()


@dataclass(frozen=True)
class PrefillChunk:
    """A run of one request's tokens whose KV is computed in one step.

    `token_ids` stand at positions `start`, `start + 1`, and so on. `block_table` lists the physical
    blocks of the request in logical order and covers at least `start + len(token_ids)` tokens; the
    KV of every earlier position is in them already. `sample` is set on the last chunk of a prompt:
    the engine then returns the token that follows.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None = None


@dataclass(frozen=True)
class DecodeSlot:
    """One request's part of a batched decode step.

    The engine writes the KV of `token_id` at `position` into the pool and returns the token that
    follows. `block_table` covers `position + 1` tokens.
    """

    token_id: int
    position: int
    block_table: Sequence[int]
    sample: SampleSpec


@dataclass(frozen=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability before temperature and filters."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class Sampled:
    """A chosen token; `logprob` and `top` are filled where the request asked for them.

    `last` says that the grammar of the answer allows nothing after it. Where `fault` is not empty
    no token could be chosen for this request, for that reason, and `token_id` means nothing; the
    others of the step are unharmed. `not_finite` says that the reason is what was computed, which
    is no numbers, and not what was asked for: the KV that it was computed from may be wrong.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = field(default=())
    last: bool = False
    fault: str = ""
    not_finite: bool = False


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; no chat template; special tokens as the model's tokenizer adds
        them by default."""
        ...

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of (role, content) messages through the model's chat template, with the prompt
        for the assistant's turn at the end. ValueError when the model has no template or the
        template refuses the messages."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; bytes that are not yet a character decode to
        U+FFFD."""
        ...


class KvMemory(Protocol):
    """The bytes of a pool of blocks, in the canonical order whatever the layout's format.

    A *slab* is what a chunk on the wire carries: for each of `blocks` in turn, the bytes of layers
    `[layer, layer + layers)` of `group`, of all heads that are here or of `heads` (first, count)
    alone. Layers and heads are counted over the model, also where only some of them are here.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def stored(self) -> KvMemory:
        """The same pool with the bytes of each layer of a block as they lie there, in the layout's
        format; the memory itself where that is canonical."""
        ...

    @property
    def shared_fd(self) -> int | None:
        """The memfd that the pool lies in, from its first byte on, block after block; None where it
        does not lie in one."""
        ...

    @property
    def host_address(self) -> int | None:
        """Where in this process the pool begins, block after block, for what writes there by
        address; None where it does not lie in the host's memory as one. It stays there for as long
        as the engine lives."""
        ...

    def read(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        heads: tuple[int, int] | None = None,
    ) -> list[memoryview]:
        """The slab as read-only pieces of any size to be joined in order, without a copy where the
        memory is on the host and has this order, unless it is of some heads alone. The pieces are
        valid while the caller holds the blocks."""
        ...

    def write(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        payload: memoryview,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Copy a slab into the pool, once. ValueError when `payload` has another size."""
        ...


@dataclass(frozen=True)
class EngineShard:
    """One rank of an instance: its place, and the memory of the layers and heads that it holds."""

    place: Place
    memory: KvMemory


class EngineFault(Exception):
    """The engine could not run a step; the message says why. The engine stays usable, and the step
    may be run again, whole or in parts: what it has written is written again. What concerns one
    request alone, such as logits that leave no token, is the `fault` of its `Sampled` instead."""


class Engine(ABC):
    """A model with its KV pool."""

    name: str
    """What people call the model, such as `SmolLM2-135M-Instruct`."""
    layout: KvLayout
    memory: KvMemory
    """Of several shards that of the first; all have as many blocks, and the same numbers."""
    vocab_size: int
    max_model_len: int
    """Prompt plus output may have at most this many tokens."""
    eos_token_ids: frozenset[int]
    features: frozenset[str]
    """Sampling features beyond the plain ones that it has, by the names of the fields of
    SamplingParams that need them, such as `logprobs`."""

    grammars: Grammars | None = None
    """What compiles the grammars that answers follow, of an engine with `structured_output`."""

    @property
    def shards(self) -> tuple[EngineShard, ...]:
        """Its ranks, at least one."""
        return (EngineShard(Place(whole(self.layout)), self.memory),)

    @abstractmethod
    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        """Compute the KV of every chunk of the batch into the pool.

        Calls `on_layer(group, layer)` after each layer, once the KV of that layer is in the pool
        for every chunk; what it raises ends the step. Returns, for each chunk, the token that
        follows where `sample` is set, else None. EngineFault when the step fails.
        """

    @abstractmethod
    def decode(self, batch: Sequence[DecodeSlot]) -> list[Sampled]:
        """One decode step: a token for every slot, in order. EngineFault when the step fails."""

    def step(
        self,
        chunks: Sequence[PrefillChunk],
        slots: Sequence[DecodeSlot],
        on_layer: Callable[[int, int], None],
    ) -> tuple[list[Sampled | None], list[Sampled]]:
        """Chunks and slots, of which no two are of one request, in one step: what `prefill` returns
        for the chunks and `decode` for the slots. An engine that can serve both in one pass over
        its weights does so; others take one after the other. EngineFault when the step fails."""
        prefilled = self.prefill(chunks, on_layer) if chunks else []
        return prefilled, self.decode(slots) if slots else []

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; loaded with the model, cheap to call, safe from any thread."""

    def warm_up(self) -> None:  # noqa: B027 - an engine may have nothing to do
        """Run what makes the first real step slow. Called once before the server is ready; touches
        block 0 of the pool at most, which is free then."""

    def close(self) -> None:  # noqa: B027 - an engine may have nothing to do
        """Give back what the engine holds outside Python's memory."""
