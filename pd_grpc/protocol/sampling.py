"""What a request asks of the sampler, validated once, the same on router, P and D."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_JSON_SCHEMA_BYTES = 65536
MAX_REGEX_BYTES = 16384


@dataclass(frozen=True)
class FieldError:
    """One field that is wrong: its path, and what is allowed."""

    field: str
    description: str


class GrammarKind(enum.Enum):
    """How a grammar is written; the values are the fields of StructuredOutput."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True)
class StructuredOutput:
    """A grammar that an answer follows. `kind` is None where the client named none."""

    kind: GrammarKind | None
    text: str

    def error(self, reason: str, prefix: str = "sampling") -> FieldError:
        """What is wrong with it, in words that follow its kind."""
        told = reason if self.kind is None else f"{self.kind.value}: {reason}"
        return FieldError(f"{prefix}.structured_output", told)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen and when they end.

    A sampled token is a pure function of the logits, the tokens before it, `seed` and the position
    it will stand at, so P, D and an aggregated server choose alike. `temperature` 0 is greedy.
    `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off, `repetition_penalty` 1 and 0 of the
    other two the penalties. `logprobs` is None for none, otherwise how many alternatives are
    reported beside the chosen token (0 to 20). `min_tokens` keeps end-of-sequence and stop token
    ids from being sampled, and stop strings from ending the answer, before that many tokens.
    `logit_bias` has pairs of token id and bias, by ascending id.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    structured_output: StructuredOutput | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether the tokens of a request so far change what comes next."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


_PENALTY_LIMIT = f"must be a number between -{MAX_PENALTY:g} and {MAX_PENALTY:g}"


def sampling_errors(s: Sampling, prefix: str = "sampling") -> list[FieldError]:
    """Every field of `s` that is out of its bounds; empty when all is well."""
    checks = [
        ("max_tokens", s.max_tokens >= 1, "must be at least 1"),
        (
            "min_tokens",
            # Measured against a max_tokens that is one.
            s.min_tokens >= 0 and (s.max_tokens < 1 or s.min_tokens <= s.max_tokens),
            "must be between 0 and max_tokens",
        ),
        (
            "temperature",
            math.isfinite(s.temperature) and 0 <= s.temperature <= 100,
            "must be a number between 0 and 100",
        ),
        ("top_p", math.isfinite(s.top_p) and 0 < s.top_p <= 1, "must be above 0 and at most 1"),
        ("top_k", s.top_k >= 0, "must be 0 (off) or positive"),
        ("seed", 0 <= s.seed < 2**64, "must fit 64 unsigned bits"),
        ("stop", len(s.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"),
        (
            "stop",
            all(0 < len(x) <= MAX_STOP_STRING_CHARS for x in s.stop),
            f"each string must have 1 to {MAX_STOP_STRING_CHARS} characters",
        ),
        (
            "stop_token_ids",
            len(s.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"at most {MAX_STOP_TOKEN_IDS} ids",
        ),
        (
            "logprobs",
            s.logprobs is None or 0 <= s.logprobs <= MAX_TOP_LOGPROBS,
            f"must be between 0 and {MAX_TOP_LOGPROBS}",
        ),
        # What is no number fails each of these comparisons.
        ("min_p", 0 <= s.min_p <= 1, "must be a number between 0 and 1"),
        ("presence_penalty", abs(s.presence_penalty) <= MAX_PENALTY, _PENALTY_LIMIT),
        ("frequency_penalty", abs(s.frequency_penalty) <= MAX_PENALTY, _PENALTY_LIMIT),
        (
            "repetition_penalty",
            0 < s.repetition_penalty < math.inf,
            "must be a finite number above 0",
        ),
        (
            "logit_bias",
            len(s.logit_bias) <= MAX_BIASED_TOKENS,
            f"at most {MAX_BIASED_TOKENS} tokens",
        ),
        (
            "logit_bias",
            all(abs(bias) <= MAX_BIAS for _, bias in s.logit_bias),
            f"each bias must be a number between -{MAX_BIAS:g} and {MAX_BIAS:g}",
        ),
    ]
    wrong = [FieldError(f"{prefix}.{name}", limit) for name, ok, limit in checks if not ok]
    if s.structured_output is not None:
        wrong += _grammar_errors(s.structured_output, prefix)
    return wrong


def _grammar_errors(grammar: StructuredOutput, prefix: str) -> list[FieldError]:
    """Of its size; what it says is for those to judge who can read it."""
    if grammar.kind is None:
        return [grammar.error("one of json_schema and regex must be set", prefix)]
    is_schema = grammar.kind is GrammarKind.JSON_SCHEMA
    most = MAX_JSON_SCHEMA_BYTES if is_schema else MAX_REGEX_BYTES
    size = len(grammar.text.encode())
    if 1 <= size <= most:
        return []
    return [grammar.error(f"must have 1 to {most} bytes of UTF-8, not {size}", prefix)]


def vocabulary_errors(s: Sampling, vocab_size: int, prefix: str = "sampling") -> list[FieldError]:
    """The first token that `s` gives a bias and the model does not have, if any."""
    beyond = [token_id for token_id, _ in s.logit_bias if token_id >= vocab_size]
    if not beyond:
        return []
    limit = f"{beyond[0]} is outside the vocabulary; ids are below {vocab_size}"
    return [FieldError(f"{prefix}.logit_bias", limit)]
