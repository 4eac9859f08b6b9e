"""What D's machine waits for the time of, each named by what it ends."""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias


class TransferTimer(enum.Enum):
    """What may end a transfer or its wait; the values are what an operator reads."""

    BUDGET = "budget"
    MAX_WAIT = "max_wait"
    FIRST_TOKEN = "first_token"
    ATTACH = "attach"


class OfTransfer(NamedTuple):
    """One of a transfer's timers."""

    grant_id: str
    timer: TransferTimer


class Silence(NamedTuple):
    """No heartbeat on a session's stream."""

    stream: int


class Grace(NamedTuple):
    """A broken session that does not come back."""

    session_id: str


class OfServer(enum.Enum):
    """What concerns all of D."""

    STEP = "step"
    DRAIN = "drain"


TimerKey: TypeAlias = OfTransfer | Silence | Grace | OfServer
