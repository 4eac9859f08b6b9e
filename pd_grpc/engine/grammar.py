"""Answers that follow a JSON schema or a regular expression, by llguidance.

Where a grammar stands is a pure function of the grammar and the tokens of the answer so far. So
nothing of it is kept but to save time: whoever has both goes on, P, D after P's first token, D
after a preemption, or another D for an answer that was begun elsewhere.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from pd_grpc.engine.base import Sampled, SampleSpec
from pd_grpc.engine.grammar_trial import Trials, limits, needs_trial
from pd_grpc.engine.sampler import Mask
from pd_grpc.protocol.sampling import GrammarKind, StructuredOutput

if TYPE_CHECKING:  # Of the library's stubs alone.
    from llguidance._lib import JsonCompileOptions

FEATURE = "structured_output"

_KEPT_GRAMMARS = 64
_KEPT_POSITIONS = 512
_QUICK_S = 0.05
_WALKS = 4
_WALK_TOKENS = 24
_SOME_TEXT = 400

_JSON: JsonCompileOptions = {
    # White space without an end is valid JSON, and small models like it.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
"""How schemas are read, whatever `x-guidance` in them says."""


class GrammarError(ValueError):
    """A grammar that cannot be used, or output that it does not allow; says why."""


@dataclass(eq=False)
class Grammar:
    """A compiled grammar. `start` stands before the first token; what goes on from it is a copy,
    and all copies share a lexer, which grows as they go. `compile_s` is how long it took."""

    wanted: StructuredOutput
    start: LLMatcher
    compile_s: float


@dataclass(eq=False)
class Position:
    """Where one answer stands."""

    grammar: Grammar
    matcher: LLMatcher


class Grammars:
    """The grammars of one engine. A grammar that somebody holds is not compiled twice."""

    def __init__(
        self,
        make_tokenizer: Callable[[], LLTokenizer],
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """`make_tokenizer` is called once, by the first request that needs it."""
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._making = threading.Lock()
        self._lock = threading.Lock()
        """Of the tables; never held for long."""
        self._live: WeakValueDictionary[StructuredOutput, Grammar] = WeakValueDictionary()
        self._recent: OrderedDict[StructuredOutput, Grammar | str] = OrderedDict()
        """Those used last, or what is wrong with them."""
        self._positions: OrderedDict[tuple[StructuredOutput, tuple[int, ...]], Position] = (
            OrderedDict()
        )

    def known(self, wanted: StructuredOutput) -> Grammar | None:
        """One that need not be compiled; None for another. GrammarError when it is known to be
        wrong. Quick, and safe from any thread."""
        with self._lock:
            found = self._live.get(wanted) or self._recent.get(wanted)
            if found is not None:
                self._keep(wanted, found)
        if isinstance(found, str):
            raise GrammarError(found)
        return found

    def compile(self, wanted: StructuredOutput, trials: Trials) -> Grammar:
        """Compile one that a client sent, what may be dear after a trial. GrammarError when that
        cannot be done, or takes more than it may; RuntimeError as for trials. Safe from any thread
        but the loop's: it may take seconds."""
        found = self.known(wanted)
        if found is not None:
            return found
        try:
            found = self._compile(wanted, trials)
        except GrammarError as error:
            with self._lock:
                self._keep(wanted, str(error))
            raise
        with self._lock:
            self._keep(wanted, found)
        return found

    def check_output(self, grammar: Grammar, output: Sequence[int]) -> int:
        """How many tokens of `output` from its first one the grammar allows. Safe from any
        thread."""
        return grammar.start.deep_copy().try_consume_tokens(list(output))

    def choose(self, spec: SampleSpec, choose: Callable[[Mask], Sampled]) -> Sampled:
        """The token that `choose` takes of those the grammar allows, which it gets as a mask of
        shape `(vocab,)`. On the engine thread."""
        wanted = spec.sampling.structured_output
        assert wanted is not None
        output = tuple(spec.output)
        try:
            position, mask = self._mask(wanted, output)
            chosen = choose(self._narrowed(mask, spec))
            if chosen.fault:
                return chosen
            if not position.matcher.consume_token(chosen.token_id):
                raise GrammarError(_first_line(position.matcher.get_error()))
        except GrammarError as error:
            return Sampled(-1, fault=f"{FEATURE}: {error}")
        last = chosen.token_id in self._eos or position.matcher.is_stopped()
        if not last:
            self._positions[wanted, (*output, chosen.token_id)] = position
            if len(self._positions) > _KEPT_POSITIONS:
                self._positions.popitem(last=False)
        return replace(chosen, last=last)

    def _mask(self, wanted: StructuredOutput, output: tuple[int, ...]) -> tuple[Position, Mask]:
        position = self._positions.pop((wanted, output), None) or self._replay(wanted, output)
        try:
            return position, self._allowed(position)
        except GrammarError:
            # The lexer that all answers of a grammar share may be full of what others said.
            if position.grammar.compile_s > _QUICK_S:
                raise
            position = self._replay(wanted, output, stale=position.grammar)
            return position, self._allowed(position)

    def _allowed(self, position: Position) -> Mask:
        packed = position.matcher.compute_bitmask()
        # The mask of what is in error allows the end.
        if position.matcher.is_error():
            raise GrammarError(_first_line(position.matcher.get_error()))
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        mask = bits[: self._vocab_size].astype(np.bool_)
        if not mask.any():
            raise GrammarError("no token of the model goes on with it")
        return mask

    def _replay(
        self, wanted: StructuredOutput, output: tuple[int, ...], stale: Grammar | None = None
    ) -> Position:
        grammar = self.known(wanted)
        if grammar is None or grammar is stale:
            grammar = self._compile(wanted, None)
            with self._lock:
                self._keep(wanted, grammar)
        matcher = grammar.start.deep_copy()
        if not matcher.consume_tokens(list(output)):
            raise GrammarError("the answer so far does not follow it")
        return Position(grammar, matcher)

    def _narrowed(self, mask: Mask, spec: SampleSpec) -> Mask:
        """Without what ignore_eos and min_tokens leave out, unless nothing else may follow."""
        sampling = spec.sampling
        left_out: list[Collection[int]] = []
        if sampling.ignore_eos:
            left_out.append(self._eos)
        if spec.generated < sampling.min_tokens:
            left_out += [self._eos, sampling.stop_token_ids]
        for token_ids in left_out:
            fewer = mask.copy()
            fewer[[i for i in token_ids if i < len(fewer)]] = False
            if fewer.any():
                mask = fewer
        return mask

    def _compile(self, wanted: StructuredOutput, trials: Trials | None) -> Grammar:
        """With `trials` one that has not been tried yet."""
        text = self._source(wanted)
        dear = wanted.kind is GrammarKind.JSON_SCHEMA and needs_trial(wanted.text)
        if trials is not None and dear and (wrong := trials.try_grammar(text)):
            raise GrammarError(_first_line(wrong))
        tokenizer, allowed = self._tokens(), limits()
        begun = time.thread_time()
        start = LLMatcher(tokenizer, text, log_level=0, limits=allowed)
        if not start.is_error():
            # Finds those that no answer can follow; the state stays where it was.
            start.compute_bitmask()
        if start.is_error():
            wrong = start.get_error()
            nothing = wrong.startswith("NoExtension")
            raise GrammarError("no answer can follow it" if nothing else _first_line(wrong))
        grammar = Grammar(wanted, start, time.thread_time() - begun)
        if trials is not None:
            self._begin_answers(grammar, allowed.max_lexer_states)
        return grammar

    def _begin_answers(self, grammar: Grammar, longest: int) -> None:
        """Begin a few answers at random. GrammarError when the library's bounds end one of them,
        for so would they end a request's: the work of a bound such as `a{1000000}` is not done when
        the grammar is compiled. At no place it may leave more than `longest` bytes without a
        choice: each token costs time in them."""
        forced = len(grammar.start.compute_ff_bytes())
        if forced > longest:
            raise GrammarError(
                f"leaves no choice for {forced} bytes; at most {longest} may follow so"
            )
        for seed in range(_WALKS):
            choice = random.Random(seed)
            walker = Position(grammar, grammar.start.deep_copy())
            for _ in range(_WALK_TOKENS):
                token_id = int(choice.choice(np.flatnonzero(self._allowed(walker))))
                if not walker.matcher.consume_token(token_id):
                    raise GrammarError(_first_line(walker.matcher.get_error()))
                if token_id in self._eos or walker.matcher.is_stopped():
                    break

    def _source(self, wanted: StructuredOutput) -> str:
        """In the library's own form."""
        if wanted.kind is GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(wanted.text)
        # Of the two schemas that are no objects this one can be followed.
        text = "{}" if wanted.text.strip() == "true" else wanted.text
        try:
            return LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
        except ValueError as error:
            raise GrammarError(_what_is_wrong(str(error))) from error

    def _tokens(self) -> LLTokenizer:
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            return self._tokenizer

    def _keep(self, wanted: StructuredOutput, found: Grammar | str) -> None:
        self._recent[wanted] = found
        self._recent.move_to_end(wanted)
        if isinstance(found, Grammar):
            self._live[wanted] = found
        if len(self._recent) > _KEPT_GRAMMARS:
            self._recent.popitem(last=False)


def _what_is_wrong(said: str) -> str:
    """With a schema that the library does not take for one, which it says of a place in the text
    where that is no JSON."""
    if " at line " in said:
        return f"cannot be read as JSON: {_first_line(said)}"
    if said.startswith("Expecting object schema"):
        return "must be an object or true"
    return _first_line(said)


def _first_line(text: str) -> str:
    """What an error says, without the picture of the place that it draws."""
    lines = [line.strip() for line in text.strip().splitlines()]
    told = " ".join(line for line in lines if line and not line.startswith("<"))
    return told[:_SOME_TEXT] or "it failed without a reason"
