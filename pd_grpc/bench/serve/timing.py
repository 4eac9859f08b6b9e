"""What a client sees of an answer, from the moments its messages came. Pure arithmetic.

- *TTFT*: from sending the request to the message with its first token.
- *TPOT*: from there to the message with the last token, over the tokens but the first.
- A *message gap* is the time between two messages of an answer that carry tokens: what a reader
  waits for. vLLM's benchmark takes its inter-token latency so.
- A *token gap* counts each token: where a message brings k tokens g seconds after the last one,
  k gaps of g / k; further tokens of the first message have 0. They sum to TPOT times their number.
- *Goodput* counts the requests whose TTFT and TPOT both keep an objective, as DistServe does
  (OSDI 2024). One that fails keeps none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Message(NamedTuple):
    """Tokens that came together, and when, in seconds since the load began."""

    at_s: float
    tokens: int


@dataclass(frozen=True)
class Heard:
    """One request and its answer: when it was sent, in seconds since the load began, what came, and
    what went wrong; `fault` is empty for an answer that is whole."""

    name: str
    sent_s: float
    messages: Sequence[Message]
    token_ids: Sequence[int] = ()
    fault: str = ""
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    """Its timings as the router tells them."""

    @classmethod
    def of_wire(cls, wire: Mapping[str, Any]) -> Heard:
        """From what JSON makes of one."""
        heard = [Message(at_s, tokens) for at_s, tokens in wire["messages"]]
        return cls(**{**wire, "messages": heard})

    @property
    def finished(self) -> bool:
        """Whether the answer came whole."""
        return not self.fault

    @property
    def tokens(self) -> int:
        """How many came."""
        return sum(message.tokens for message in self.messages)

    @property
    def ended_s(self) -> float:
        """When the last came; when it was sent, if none did."""
        return self.messages[-1].at_s if self.messages else self.sent_s

    @property
    def ttft_s(self) -> float:
        """See above. ValueError for an answer without a token."""
        if not self.messages:
            raise ValueError(f"{self.name}: there is no first token")
        return self.messages[0].at_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """See above; None for an answer of one token."""
        if self.tokens < 2:
            return None
        return (self.ended_s - self.messages[0].at_s) / (self.tokens - 1)


def message_gaps_s(answer: Heard) -> list[float]:
    """One for each message but the first."""
    times = [message.at_s for message in answer.messages]
    return [after - before for before, after in itertools.pairwise(times)]


def token_gaps_s(answer: Heard) -> list[float]:
    """One for each token but the first."""
    if not answer.messages:
        return []
    gaps = [0.0] * (answer.messages[0].tokens - 1)
    for message, gap in zip(answer.messages[1:], message_gaps_s(answer), strict=True):
        gaps += [gap / message.tokens] * message.tokens
    return gaps


@dataclass(frozen=True)
class Objective:
    """What an answer should keep to."""

    ttft_s: float
    tpot_s: float

    def met(self, answer: Heard) -> bool:
        """Whether it came whole and did; an answer of one token has only a TTFT."""
        if not answer.finished or not answer.messages:
            return False
        return answer.ttft_s <= self.ttft_s and (answer.tpot_s or 0.0) <= self.tpot_s


def saturated_rate(ends_s: Sequence[float], at_once: int) -> float:
    """Answers a second of a closed load, from the moments they ended, while `at_once` requests were
    under way: the first and the last `at_once` to end are left out, for then the load was getting
    going or running out. ValueError when that leaves none."""
    ends = sorted(ends_s)
    counted = len(ends) - 2 * at_once
    if counted < 1:
        raise ValueError(f"{len(ends)} answers are too few with {at_once} at once")
    return counted / (ends[len(ends) - at_once - 1] - ends[at_once - 1])
