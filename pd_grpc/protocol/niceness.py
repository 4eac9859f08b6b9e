"""Threads that stand back where cores are scarce."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

MOST = 19


def stand_back(by: int) -> None:
    """Make this thread nicer by so much than its process is; the threads that it makes from now on
    are as nice. It takes no privilege. Only on Linux threads have a niceness of their own, and
    nothing happens elsewhere, or where a sandbox forbids it."""
    if by <= 0 or sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(MOST, own + by))
