"""From any thread onto a loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call a function on a loop. Nothing happens once the loop has closed, for nobody is left to
    tell; to ask first would be a race."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
