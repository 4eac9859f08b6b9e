"""What an instance goes through, as lines of its log."""

from __future__ import annotations

import logging

from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event

DRAINING = "draining"
STOPPING = "stopping"
"""Why an instance is not ready that is on its way out."""


class LifeLog:
    """Told of every change of readiness, it writes those that are news."""

    def __init__(self, log: InstanceLog) -> None:
        self._log = log
        self._was: tuple[bool, str] | None = None
        self._has_served = False

    def started(self, role: str, endpoint: str) -> None:
        """It answers calls."""
        self._log.note(Event.INSTANCE_STARTED, "%s answers at %s", role, endpoint)

    def readiness(self, ready: bool, reason: str) -> None:
        """It takes requests, or why it takes none."""
        now = (ready, reason)
        if now == self._was:
            return
        self._was = now
        if ready:
            self._has_served = True
            self._log.note(Event.INSTANCE_READY, "ready")
        elif reason == DRAINING:
            self._log.note(Event.INSTANCE_DRAINING, "takes nothing new, finishes what it has")
        elif reason != STOPPING:
            # One that is about to begin has nothing to be warned of.
            level = None if self._has_served else logging.INFO
            self._log.note(Event.INSTANCE_NOT_READY, "not ready: %s", reason, level=level)

    def stopped(self) -> None:
        """Everything has ended."""
        self._log.note(Event.INSTANCE_STOPPED, "stopped")
        self._log.close()
