"""The events that have a line in the log, in one table: docs and tests read it."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """The line of an event: its usual level, the roles that write it, and when."""

    level: int
    roles: str
    when: str


_DEBUG, _INFO, _WARNING, _ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR
_ALL, _P, _D, _ROUTER = "all", "prefill", "decode", "router"


@enum.unique
class Event(enum.Enum):
    """What happened. The name, in small letters, is the field `event` of its line."""

    INSTANCE_STARTED = Line(_INFO, _ALL, "the instance answers calls")
    INSTANCE_READY = Line(_INFO, _ALL, "it takes requests, for the first time or again")
    INSTANCE_NOT_READY = Line(
        _WARNING,
        _ALL,
        "it takes none: its engine or KV sender is stuck, a newer process has its name, a role has "
        "no instance",
    )
    INSTANCE_DRAINING = Line(_INFO, _ALL, "it takes nothing new and finishes what it has")
    INSTANCE_STOPPED = Line(_INFO, _ALL, "everything of it has ended")
    PEER_READY = Line(_INFO, _ROUTER, "an instance takes requests, for the first time or again")
    PEER_NOT_READY = Line(_INFO, _ROUTER, "an instance takes none, or is out of reach, and why")
    PEER_RESTARTED = Line(_INFO, _ROUTER, "another process answers under the name of an instance")
    SESSION_OPENED = Line(_INFO, "prefill, decode", "P and D have a session, also one that is back")
    SESSION_LOST = Line(
        _WARNING,
        "prefill, decode",
        "a session broke, was refused, or was silent; on D once more when P's transfers end by it",
    )
    SESSION_ENDED = Line(_INFO, _D, "P said goodbye")
    TRANSPORT_UNUSABLE = Line(
        _INFO, "prefill, decode", "a transport of the settings cannot be used here, and why"
    )
    TRANSPORT_FAILED = Line(
        _INFO,
        _P,
        "what a D has chosen does not get KV there, as between two hosts; P offers it no more",
    )
    BREAKER_OPENED = Line(_WARNING, _P, "a D is asked no more until a probe of it is answered")
    BREAKER_CLOSED = Line(_INFO, _P, "that D is asked again")
    REQUEST_FAILED = Line(
        _WARNING,
        _ALL,
        "a request, or an attempt of it, failed; info where the client's own doing ended it",
    )
    REQUEST_ELSEWHERE = Line(
        _INFO, _ROUTER, "a request that failed is tried again or goes on with other instances"
    )
    RELEASE_UNHEARD = Line(_DEBUG, _P, "D could not be told that a transfer has ended")
    COLLECTOR_AWAY = Line(
        _WARNING,
        _ALL,
        "the OTLP collector takes no spans, or no metrics: they are dropped, and why",
    )
    COLLECTOR_SLOW = Line(_WARNING, _ALL, "it takes fewer spans than are made: some are dropped")
    COLLECTOR_BACK = Line(_INFO, _ALL, "it takes them again")
    ENGINE_RAISED = Line(_ERROR, "prefill, decode", "the engine raised, with the traceback")
    DEFECT = Line(_ERROR, _ALL, "something raised that nobody foresaw, with the traceback")
    LINES_LEFT_OUT = Line(_WARNING, _ALL, "how many lines of one kind were not written")

    @property
    def level(self) -> int:
        """The usual one."""
        return self.value.level

    @property
    def field(self) -> str:
        """As it is written."""
        return self.name.lower()
