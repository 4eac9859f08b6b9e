"""A wire between P and D that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Wire:
    """Passes every connection on to `target`, host:port, while it is whole."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._whole = True
        self.endpoint = ""

    def cut(self) -> None:
        """Lose every connection, and every new one until `mend`."""
        self._whole = False
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        """Let new connections through."""
        self._whole = True

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection has come."""
        if not self._whole:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(_pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End everything."""
        self.cut()
        if self._tasks:
            await asyncio.wait(list(self._tasks))


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass
    finally:
        sink.transport.abort()


@asynccontextmanager
async def wire_to(target: str) -> AsyncIterator[Wire]:
    """A wire to `target`; reached at its `endpoint`."""
    wire = Wire(target)
    server = await asyncio.start_server(wire.take, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    wire.endpoint = f"{host}:{port}"
    try:
        yield wire
    finally:
        await wire.close()
        server.close()
        await server.wait_closed()
