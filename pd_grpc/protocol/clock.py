"""The one home of time: every rule of the protocol is given a clock and never reads another."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time as the protocol sees it: durations on a monotonic clock, wall time only for people."""

    def now(self) -> float:
        """Seconds on a monotonic clock; only differences mean anything."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, for spans, logs and minting epochs."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()


class ManualClock:
    """A clock that moves only when told, so tests of leases and timeouts never sleep."""

    def __init__(self, start_s: float = 1000.0, wall_ns: int = 1_700_000_000_000_000_000) -> None:
        self._start_s = start_s
        self._now = start_s
        self._wall_ns = wall_ns

    def now(self) -> float:
        return self._now

    def wall_ns(self) -> int:
        return self._wall_ns + int((self._now - self._start_s) * 1e9)

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds` (>= 0) and return the new time."""
        if seconds < 0:
            raise ValueError(f"a clock cannot move back by {-seconds} s")
        self._now += seconds
        return self._now
