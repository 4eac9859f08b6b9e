"""What else a machine may be busy with while a D on it decodes, to compare with KV that D takes in
itself."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

SPINNERS = 2
"""As many as there are processes busy with the transfers to a D: it, and P."""


@contextlib.asynccontextmanager
async def spinning() -> AsyncIterator[None]:
    """Processes that compute and do nothing else: what the machine's scheduler makes of them is
    none of our doing."""
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [await asyncio.create_subprocess_exec(*spin) for _ in range(SPINNERS)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            await process.wait()
