"""What a request asks of the sampler, validated once, the same on router, P and D."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen and when they end.

    A sampled token is a pure function of the logits, `seed` and the position it will stand at, so
    P, D and an aggregated server choose alike. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1
    switch those filters off. `logprobs` is None for none, otherwise how many alternatives are
    reported beside the chosen token (0 to 20). `min_tokens` keeps end-of-sequence and stop token
    ids from being sampled, and stop strings from ending the answer, before that many tokens.
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

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class FieldError:
    """One field that is wrong: its path, and what is allowed."""

    field: str
    description: str


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
    ]
    return [FieldError(f"{prefix}.{name}", limit) for name, ok, limit in checks if not ok]
