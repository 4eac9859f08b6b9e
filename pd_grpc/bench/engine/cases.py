"""What is run: batches of prompts, and what one run of them took."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PROMPT_TOKENS = 32
NEW_TOKENS = 64
PREFILL_TOKENS = 1024
MIXED_BATCH = 16
MIXED_LENGTHS = (8, 512)
SEED = 8


@dataclass(frozen=True)
class Case:
    """Prompts of `lengths` tokens, each answered with `new_tokens`, all of them together."""

    name: str
    lengths: tuple[int, ...]
    new_tokens: int

    @property
    def steps(self) -> int:
        """Of decoding; the first token comes from the prefill."""
        return self.new_tokens - 1

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids at random from a fixed seed, the same in every run."""
        draw = random.Random(SEED)
        return [draw.choices(range(vocab_size), k=length) for length in self.lengths]


def cases_of(new_tokens: int) -> tuple[Case, ...]:
    """Those of the figures. The lengths of `mixed` are drawn evenly between its bounds."""
    draw = random.Random(SEED)
    mixed = tuple(draw.randint(*MIXED_LENGTHS) for _ in range(MIXED_BATCH))
    return (
        Case("b1", (PROMPT_TOKENS,), new_tokens),
        Case("b4", (PROMPT_TOKENS,) * 4, new_tokens),
        Case("b16", (PROMPT_TOKENS,) * 16, new_tokens),
        Case("mixed", mixed, new_tokens),
        Case("prefill", (PREFILL_TOKENS,), 1),
    )


@dataclass(frozen=True)
class Timed:
    """One run of a case: seconds until every prompt had its first token, and from there until all
    had their last; the new tokens of each prompt, in order."""

    prefill_s: float
    decode_s: float
    tokens: Sequence[Sequence[int]]
