"""A line to a server that a test can cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pd_grpc.conformance.router.line import Line


@asynccontextmanager
async def line_to(target: str, line: Line | None = None) -> AsyncIterator[Line]:
    """A line to `target`, host:port; reached at its `endpoint`."""
    line = line or Line("127.0.0.1:0")
    host, _, port = target.rpartition(":")
    await line.open(host, int(port))
    try:
        yield line
    finally:
        await line.cut()
