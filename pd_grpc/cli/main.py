"""The `pd-grpc` command: light, so that a signal in its first second finds a handler.

Importing what the commands need takes a good part of a second, in which Python itself would answer
Ctrl-C with a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_LASTING = ("up", "serve")
"""Commands that run until they are told to stop, so that a signal is no failure of theirs."""


def app() -> None:
    """Run the command that the arguments name."""
    before = {signum: signal.signal(signum, _leave) for signum in (signal.SIGINT, signal.SIGTERM)}
    from pd_grpc.cli.commands import run

    run(before)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Nothing has begun, so there is nothing to clear away. An exception would not do: in the midst
    of an import it may come out as another one, as from a class's `__set_name__` before Python
    3.12."""
    os._exit(0 if sys.argv[1:2] and sys.argv[1] in _LASTING else 128 + signum)


if __name__ == "__main__":
    app()
