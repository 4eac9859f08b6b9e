"""Where the time of one answer went, from the moments the router saw and what P reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_grpc.protocol.messages import duration, seconds
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import types_pb2

_OF_PREFILL = ("queue", "prepare", "allocate", "compute", "exposed_send")


@dataclass
class AnswerTimes:
    """Moments of one request on the router's clock, in seconds, and P's part of the timings.

    No clock is shared between machines, so the way of a request to P is taken to be half of the
    time from the opening of the leg to P's first word, as NTP takes it (RFC 5905): the error is
    half of what the two ways differ by. There `routed` is and route ends, and P's queue begins.
    `first_token` is what is left of the time to first token as the router measured it once route
    and P's queue, prepare and compute are taken away: P's sending, D's passing on, and the ways in
    between. The stages so add up to the time to first token; if P reported more time than passed
    here, `first_token` is 0 and the sum shows it. `key` is the request's transfer, with its last
    attempt, once it has ended.
    """

    accepted: float
    opened: float | None = None
    """When the legs of the first attempt were open."""
    routed: float | None = None
    first_token_at: float | None = None
    second_token_at: float | None = None
    last_token_at: float | None = None
    tokens: int = 0
    key: TransferKey | None = None
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
