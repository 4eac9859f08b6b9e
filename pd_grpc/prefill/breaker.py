"""The breaker of one D: while it is open, nobody waits for a D that cannot be had."""

from __future__ import annotations

import enum

from pd_grpc.protocol.faults import Fault


class BreakerState(enum.Enum):
    """Whether a D may be asked."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """The time is over: one request may find out whether D answers again."""


class Breaker:
    """Opens on a failure, lets one probe through when its time is over, closes on an answer.

    It stays open for `open_s`, for twice as long after each probe that fails, and never for more
    than `max_s`.
    """

    def __init__(self, open_s: float, max_s: float) -> None:
        self.fault: Fault | None = None
        """What opened it; None while it is closed."""
        self.until = 0.0
        """When a probe may go; of no meaning while it is closed."""
        self._first_s = open_s
        self._max_s = max_s
        self._open_s = open_s

    def state(self, now: float) -> BreakerState:
        """As it is now."""
        if self.fault is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.until else BreakerState.HALF_OPEN

    def left_s(self, now: float) -> float:
        """How long it stays open."""
        return self.until - now if self.state(now) is BreakerState.OPEN else 0.0

    def failed(self, fault: Fault, now: float) -> None:
        """D is lost, silent, or takes nothing; a RetryInfo of its own is kept, within `max_s`."""
        state = self.state(now)
        if state is BreakerState.OPEN:
            return  # Of a call that was under way when it opened.
        if state is BreakerState.HALF_OPEN:
            self._open_s *= 2
        self._open_s = min(self._open_s, self._max_s)
        self.fault = fault
        told_s = min(fault.retry_after_s or 0.0, self._max_s)
        self.until = now + max(self._open_s, told_s)

    def answered(self) -> None:
        """D has answered: close."""
        self.fault = None
        self._open_s = self._first_s

    def reached(self, now: float) -> None:
        """There is a connection to D again: a probe need not wait."""
        self.until = min(self.until, now)
