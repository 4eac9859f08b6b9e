"""The log of one instance: every line says whose it is, and a flood of lines is bounded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pd_grpc.telemetry.log_events import Event
from pd_grpc.telemetry.logs import LOGGER

LINES = 50
PERIOD_S = 10.0
"""Of one kind, which is an event with its reason, so many lines are written in a period. What comes
above that is counted, and the count is written when the period is over and another line is due, or
when the instance stops."""


@dataclass
class _Period:
    ends: float
    written: int = 0
    left_out: int = 0


class InstanceLog:
    """Writes lines for `instance`, of the `part` of the package that is its role. Safe from any
    thread."""

    def __init__(self, part: str, instance: str, now: Callable[[], float] = time.monotonic) -> None:
        """`now` is a monotonic clock, in seconds."""
        self._logger = logging.getLogger(f"{LOGGER}.{part}")
        self._instance = instance
        self._now = now
        self._lock = threading.Lock()
        self._periods: dict[tuple[Event, object], _Period] = {}

    def note(
        self,
        event: Event,
        message: str,
        *args: object,
        level: int | None = None,
        error: BaseException | None = None,
        **fields: object,
    ) -> None:
        """Write a line: `message % args`, the traceback of `error`, and those `fields` that may be
        written at all, see `logs.FIELDS`. `level` is the event's unless given; lines of debug are
        not counted."""
        level = event.level if level is None else level
        if not self._logger.isEnabledFor(level):
            return
        if level > logging.DEBUG and not self._has_room(event, fields.get("reason")):
            return
        self._write(event, level, message, args, error, fields)

    def close(self) -> None:
        """Write what was counted and not told."""
        self._tell(float("inf"))

    def _has_room(self, event: Event, reason: object) -> bool:
        now = self._now()
        self._tell(now)
        with self._lock:
            period = self._periods.setdefault((event, reason), _Period(now + PERIOD_S))
            if period.written == LINES:
                period.left_out += 1
                return False
            period.written += 1
            return True

    def _tell(self, now: float) -> None:
        """Write what was left out in the periods that are over."""
        with self._lock:
            over = {kind: p for kind, p in self._periods.items() if p.ends <= now}
            for kind in over:
                del self._periods[kind]
        for (event, reason), period in over.items():
            if period.left_out:
                about = event.field if reason is None else f"{event.field} {reason}"
                what = Event.LINES_LEFT_OUT
                args = period.left_out, about
                text = "%d lines of %s were left out"
                self._write(what, what.level, text, args, None, {"reason": reason})

    def _write(
        self,
        event: Event,
        level: int,
        message: str,
        args: tuple[object, ...],
        error: BaseException | None,
        fields: dict[str, object],
    ) -> None:
        extra = {**fields, "instance": self._instance, "event": event.field}
        self._logger.log(level, message, *args, exc_info=error, extra=extra)
