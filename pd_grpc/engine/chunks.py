"""Which tokens of which prompts a step computes: where a prompt may be cut, and who goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_grpc.protocol.config import EngineConfig

CUT_TOKENS = 128
"""Cut at multiples of so many tokens, a prompt has the same KV bit for bit as if it were not: an
engine's attention works in pieces that end there."""

_PASSING = 4
"""A prompt of at most this part of what the oldest has left passes by. It then gets at least one
cut of each step; with four cuts in a step it ends sooner by more than the oldest ends later."""


@dataclass(frozen=True)
class Left:
    """What is left of a prompt: `tokens` from position `start` on."""

    start: int
    tokens: int


def cut_of(config: EngineConfig) -> int:
    """Prompts are cut at multiples of so many tokens, wherever they are computed and beside whom:
    at those of CUT_TOKENS, or of `chunk_tokens` where it is no multiple of that."""
    return config.chunk_tokens if config.chunk_tokens % CUT_TOKENS else CUT_TOKENS


def step_budget(config: EngineConfig) -> int:
    """Tokens in one step of D: a full batch and a cut of a prompt always fit, and two cuts where
    nothing else is said, so that a short prompt may pass a long one by."""
    return config.step_tokens or config.max_batch + 2 * cut_of(config)


class ChunkShares:
    """Deals a step's tokens out to prompts that wait to be computed, oldest first.

    The oldest takes what it can. Where it would take the whole step and does not end with it, it
    leaves one cut to prompts that are short beside what it has left, the shortest first, so that
    none of them waits for its whole length; it has all other cuts, so that they cannot starve it. A
    step of a single cut is the oldest's. What is over goes to the others by age.
    """

    def __init__(self, cut: int, batch: int) -> None:
        """`cut` is that of `cut_of`; at most `batch` prompts take part in a step."""
        self._cut = cut
        self._batch = batch

    def deal(self, prompts: Sequence[Left], room: int) -> list[int]:
        """How many tokens of each prompt, given from the oldest on, are computed in a step of at
        most `room` tokens; 0 for one that takes no part. The oldest takes part if `room` is at
        least one cut."""
        dealt = [0] * len(prompts)
        if not prompts:
            return dealt
        oldest = prompts[0]
        passing = [i for i, p in enumerate(prompts) if i and p.tokens * _PASSING <= oldest.tokens]
        passing.sort(key=lambda i: prompts[i].tokens)
        left_over = self._cut if passing and oldest.tokens > room else 0
        dealt[0] = self._fitting(oldest, room - left_over) or self._fitting(oldest, room)
        taken = dealt[0]
        others = [i for i in range(1, len(prompts)) if i not in passing]
        for i in passing + others:
            if len(prompts) - dealt.count(0) == self._batch:
                break
            dealt[i] = self._fitting(prompts[i], room - taken)
            taken += dealt[i]
        rest = Left(oldest.start + dealt[0], oldest.tokens - dealt[0])
        dealt[0] += self._fitting(rest, room - taken)
        return dealt

    def _fitting(self, prompt: Left, room: int) -> int:
        """The most tokens, up to `room`, after which the prompt ends or may be cut."""
        if prompt.tokens <= room:
            return prompt.tokens
        end = prompt.start + room
        return max(0, end - end % self._cut - prompt.start)
