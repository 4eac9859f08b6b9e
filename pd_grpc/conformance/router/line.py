"""The address at which the router finds an instance of the kit's, which can go dead."""

from __future__ import annotations

import asyncio

from pd_grpc.protocol.endpoints import PortInUse, address, check_can_listen

_READ_BYTES = 1 << 16


class Line:
    """Passes bytes on between callers of `endpoint` and an instance. When it is cut, its
    connections are reset and new ones refused, as when a machine is gone."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is host:port; port 0 takes a free one."""
        host, _, port = endpoint.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._instance = ("", 0)
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self.connections = 0
        """Connections that have come since it was opened."""

    @property
    def endpoint(self) -> str:
        """host:port; known once it is open."""
        return address(self._host, self._port)

    async def open(self, host: str, port: int) -> None:
        """Listen, and pass on to the instance at host and port. PortInUse."""
        self._instance = (host, port)
        check_can_listen(self._host, self._port)
        await self.mend()

    async def mend(self) -> None:
        """Listen again after a cut. PortInUse when another has taken the port."""
        if self._listener is not None:
            return
        try:
            self._listener = await asyncio.start_server(self.take, self._host, self._port)
        except OSError as error:
            raise PortInUse(f"cannot listen on {self.endpoint}: {error}") from error
        self._port = self._listener.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Reset every connection and take no more, until it is mended."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._relays)

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection has come; returns when it has ended."""
        if self._listener is None:  # It was accepted as the line was cut.
            writer.transport.abort()
            return
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        self._writers.add(writer)
        try:
            back, forth = await asyncio.open_connection(*self._instance)
        except OSError:
            writer.transport.abort()
        else:
            self._writers.add(forth)
            await asyncio.gather(_pass_on(reader, forth), _pass_on(back, writer))
            self._writers.discard(forth)
        self._writers.discard(writer)
        self._relays.discard(task)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either end closes."""
    try:
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        writer.transport.abort()
    else:
        writer.close()
