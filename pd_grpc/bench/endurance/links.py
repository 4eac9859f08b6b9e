"""The way to one port of one instance, through this process: it can be cut, and KV on it spoiled.

The address of a link stays when the process behind it is another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

from pd_grpc.bench.endurance.frames import FrameSpoiler

_READ_BYTES = 1 << 16

Owner = Callable[[int], str]
"""Who has a TCP port of this machine as the near end of a connection, by name; empty for nobody
that is known."""


_SOCKETS = ("/proc/net/tcp", "/proc/net/tcp6")
"""Of both families: gRPC reaches an IPv4 address through an IPv6 socket."""


def owner_among(pids: Callable[[], dict[str, int]]) -> Owner:
    """Looks the port up in what the system knows of these processes, from any thread."""

    def find(port: int) -> str:
        wanted = _sockets_of(port)
        for name, pid in pids().items():
            # A process may end meanwhile, and so may any of its descriptors.
            with contextlib.suppress(OSError):
                held = os.listdir(f"/proc/{pid}/fd")
                if any(_is_one_of(wanted, f"/proc/{pid}/fd/{each}") for each in held):
                    return name
        return ""

    return find


def _sockets_of(port: int) -> set[str]:
    """The sockets whose near end has this port, as links to them read."""
    ends = f":{port:04X}".encode()
    found = set()
    for table in _SOCKETS:
        with contextlib.suppress(FileNotFoundError), open(table, "rb") as lines:
            # `sl local_address rem_address st ...`, the tenth is the inode; see proc(5).
            for line in (line for line in lines if ends in line):
                fields = line.split()
                if fields[1].endswith(ends):
                    found.add(f"socket:[{int(fields[9])}]")
    return found


def _is_one_of(sockets: set[str], descriptor: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(descriptor) in sockets
    return False


class _Connection:
    """A client's connection and the one to the instance."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.passing = asyncio.Event()
        self.passing.set()
        self.writers: list[asyncio.StreamWriter] = []

    def reset(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        # Whoever waits for a cut to end finds its connection closed.
        self.passing.set()


class Link:
    """Listens for the clients of one port. To be used on one loop."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cut: set[str] = set()
        self.to_spoil = 0
        """KV chunks to be spoiled yet."""
        self.upstream = ""
        """host:port behind it; empty while there is nobody."""

    @property
    def endpoint(self) -> str:
        """host:port that clients connect to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        """End every connection."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.reset()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self, client: str) -> int:
        """From now on nothing passes between this client and the instance, in either direction,
        and nobody is told. What is under way comes when the cut is healed. Returns how many
        connections it has."""
        self._cut.add(client)
        for connection in self._of(client):
            connection.passing.clear()
        return len(self._of(client))

    def heal(self, client: str) -> None:
        """End a cut."""
        self._cut.discard(client)
        for connection in self._of(client):
            connection.passing.set()

    def reset(self, client: str) -> int:
        """Close the client's connections at both ends; returns how many."""
        for connection in self._of(client):
            connection.reset()
        return len(self._of(client))

    def _of(self, client: str) -> list[_Connection]:
        return [each for each in self._connections if each.client == client]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        # Where many connect at once, what goes through the others must not wait.
        client = await asyncio.to_thread(self._owner, writer.get_extra_info("peername")[1])
        connection = _Connection(client)
        connection.writers.append(writer)
        if connection.client in self._cut:
            connection.passing.clear()
        self._connections.add(connection)
        try:
            await self._carry(connection, reader, writer)
        finally:
            connection.reset()
            self._connections.discard(connection)
            self._tasks.discard(task)

    async def _carry(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await connection.passing.wait()
        host, _, port = self.upstream.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port or 0))
        except OSError:
            return
        connection.writers.append(far_writer)
        spoiler = FrameSpoiler()
        there = self._pump(connection, reader, far_writer, spoiler)
        back = self._pump(connection, far_reader, writer, None)
        directions = {asyncio.ensure_future(there), asyncio.ensure_future(back)}
        self._tasks |= directions
        try:
            # gRPC never closes one direction alone.
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.wait(directions)
            self._tasks -= directions

    async def _pump(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        spoiler: FrameSpoiler | None,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_READ_BYTES):
                await connection.passing.wait()
                if spoiler is not None:
                    data = spoiler.passed(data, self._spoil_one)
                writer.write(data)
                await writer.drain()
            # The end is news as well, and does not pass a cut.
            await connection.passing.wait()

    def _spoil_one(self) -> bool:
        if not self.to_spoil:
            return False
        self.to_spoil -= 1
        return True
