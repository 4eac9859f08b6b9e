"""Where the time of one answer went, from the moments the router saw and what P reported."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pd_grpc.protocol.messages import duration, seconds
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import types_pb2

_OF_PREFILL = ("queue", "prepare", "allocate", "compute", "exposed_send")


@dataclass
class AnswerTimes:
    """Moments of one answer on the router's clock, in seconds, and P's part of the timings.

    No clock is shared between machines, so the way of a request to P is taken to be half of the
    time from the opening of the leg to P's first word, as NTP takes it (RFC 5905): the error is
    half of what the two ways differ by. There `routed` is and route ends, and P's queue begins.
    `first_token` is what is left of the time to first token as the router measured it once route
    and P's queue, prepare and compute are taken away: P's sending, D's passing on, and the ways in
    between. The stages so add up to the time to first token; if P reported more time than passed
    here, `first_token` is 0 and the sum shows it.
    """

    accepted: float
    opened: float | None = None
    """When the legs of the first attempt were open."""
    routed: float | None = None
    first_token_at: float | None = None
    second_token_at: float | None = None
    last_token_at: float | None = None
    tokens: int = 0
    prefill: types_pb2.Timings = field(default_factory=types_pb2.Timings)

    def answered(self, now: float) -> float:
        """P has said its first word; when the request came to it."""
        opened = now if self.opened is None else self.opened
        return opened + (now - opened) / 2

    def came(self, tokens: int, now: float) -> bool:
        """More tokens have come; whether the first is among them."""
        first = self.first_token_at is None
        if first:
            self.first_token_at = now
        self.tokens += tokens
        if self.second_token_at is None and self.tokens > 1:
            self.second_token_at = now
        self.last_token_at = now
        return first

    @property
    def after_first_s(self) -> float:
        """From its first token to its last."""
        if self.first_token_at is None or self.last_token_at is None:
            return 0.0
        return self.last_token_at - self.first_token_at

    def timings(self, now: float) -> types_pb2.Timings:
        """All of it, at the end of the answer."""
        # A P may bring the first token without a word of its own.
        opened = now if self.opened is None else self.opened
        routed = opened if self.routed is None else self.routed
        timings = types_pb2.Timings(
            route=duration(routed - self.accepted), total=duration(now - self.accepted)
        )
        for name in _OF_PREFILL:
            if self.prefill.HasField(name):
                getattr(timings, name).CopyFrom(getattr(self.prefill, name))
        first = now if self.first_token_at is None else self.first_token_at
        known = sum(seconds(value) for value in (timings.queue, timings.prepare, timings.compute))
        timings.first_token.CopyFrom(duration(first - routed - known))
        return timings


@dataclass
class RequestTimes:
    """Moments of one request on the router's clock: of its answer, or of each choice where several
    were asked for. `key` is its transfer, with the last attempt, once it has ended; of several the
    one that has failed."""

    accepted: float
    answers: list[AnswerTimes] = field(default_factory=list)
    key: TransferKey | None = None

    def another(self) -> AnswerTimes:
        """Those of the next answer."""
        self.answers.append(AnswerTimes(self.accepted))
        return self.answers[-1]

    @property
    def routed(self) -> float | None:
        """When it had come to P; of several choices, when the one that began first had."""
        return self.answers[0].routed if self.answers else None

    @property
    def first(self) -> AnswerTimes | None:
        """Those of the answer that had a token first, if any has."""
        first = min(self.answers, key=_first_token_at, default=None)
        return None if first is None or first.first_token_at is None else first

    @property
    def per_token_s(self) -> float | None:
        """From a token to the next one of the same answer, on average; None where none has two."""
        gaps = sum(max(0, times.tokens - 1) for times in self.answers)
        return sum(times.after_first_s for times in self.answers) / gaps if gaps else None


def _first_token_at(times: AnswerTimes) -> float:
    return math.inf if times.first_token_at is None else times.first_token_at
