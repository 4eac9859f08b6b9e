"""Waiting for something to become true, with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 60.0
"""Only what hangs takes as long, on however slow a machine."""


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Return when `condition` holds; it is looked at every few milliseconds. TimeoutError."""

    async def look() -> None:
        while not condition():  # noqa: ASYNC110 - what is awaited tells nobody
            await asyncio.sleep(0.002)

    await asyncio.wait_for(look(), limit_s)
