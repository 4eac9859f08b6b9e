"""Whether the machine stood still for the process that every byte of a soak goes through."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

_EVERY_S = 0.05


class Stalls:
    """How late the loop is, looked at all the time. `longest_s` is the latest it was."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[Stalls]:
        """Look until the block ends."""
        watching = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.longest_s = max(self.longest_s, time.monotonic() - due)
