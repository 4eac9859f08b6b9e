"""A line to a server that can go silent: its connections stay open and nothing passes, as when a
network is cut or a machine behind it freezes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_READ_BYTES = 1 << 16


class SilentLine:
    """Passes bytes on between callers of `endpoint` and a target, unless it is silent.

    While it is silent neither bytes nor the end of a connection pass, either way, and a new
    connection is taken but leads nowhere. What was on its way arrives when it speaks again.
    """

    def __init__(self) -> None:
        self.passed = 0
        """Bytes that have come through, both ways together."""
        self._target = ("", 0)
        self._listener: asyncio.Server | None = None
        self._speaking = asyncio.Event()
        self._speaking.set()
        self._relays: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """host:port of the near end; known once it is open."""
        assert self._listener is not None
        return f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def open(self) -> None:
        """Listen. A caller that comes before there is a target is turned away."""
        self._listener = await asyncio.start_server(self._take, "127.0.0.1", 0)

    def lead_to(self, target: str) -> None:
        """Pass on to host:port."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    def fall_silent(self) -> None:
        """Let nothing pass."""
        self._speaking.clear()

    def speak(self) -> None:
        """Let everything pass, what was held back first."""
        self._speaking.set()

    async def close(self) -> None:
        """End every connection."""
        assert self._listener is not None
        self._listener.close()
        await self.reset()

    async def reset(self) -> None:
        """End the connections there are; new ones are taken as before."""
        relays = list(self._relays)
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.ensure_future(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            await self._speaking.wait()
            back, far = await asyncio.open_connection(*self._target)
            await asyncio.gather(self._pass_on(reader, far), self._pass_on(back, writer))
        except OSError:
            return  # either end has been reset, and so is the other below
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            await self._speaking.wait()
            writer.write(data)
            await writer.drain()
            self.passed += len(data)
        await self._speaking.wait()
        writer.write_eof()


@asynccontextmanager
async def silent_line(target: str = "") -> AsyncIterator[SilentLine]:
    """A line, to host:port if that is known already."""
    line = SilentLine()
    await line.open()
    if target:
        line.lead_to(target)
    try:
        yield line
    finally:
        await line.close()
