"""Gives each P that comes an agent over D's pool, and ends the right to write by destroying it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from dataclasses import dataclass, field

from pd_grpc.transport.base import WriterNews
from pd_grpc.transport.nixl.agent import Agent, AgentError, Region
from pd_grpc.transport.nixl.wire import (
    HANDSHAKE_S,
    LARGEST_MESSAGE,
    SILENT_S,
    Connection,
    Ended,
    Unclear,
)
from pd_grpc.v1 import nixl_pb2

MOST_WRITERS = 256
"""Connections at once; the agent of each takes a thread and some descriptors."""
_Writer = tuple[str, int]


@dataclass(eq=False)
class _Attached:
    """What one connection has given a P. `over` is set once that is destroyed."""

    writer: _Writer
    serving: asyncio.Task[None]
    agent: Agent | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Acceptor:
    """One pool. A P is a writer from before it has its agent until after that is destroyed. It has
    one at most: whatever it has written by way of an earlier one can land no more when it has the
    next, even if it could not hear so."""

    def __init__(self, pool: Region, host: str) -> None:
        self.shard = nixl_pb2.NixlShard(
            secret=secrets.token_bytes(16), pool_id=secrets.token_bytes(16), pool_bytes=pool.size
        )
        self._pool = pool
        self._host = host
        self._news: WriterNews = lambda name, epoch, writes: None
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._attached: dict[_Writer, _Attached] = {}

    async def start(self, news: WriterNews) -> None:
        """Listen, on the running loop; `shard` names the port from then on."""
        self._news = news
        self._server = await asyncio.start_server(
            self._accept, self._host, 0, limit=LARGEST_MESSAGE
        )
        self.shard.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Take nobody in any more, and let nobody write."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._serving:
            task.cancel()
        while tasks := [*self._serving, *self._ending]:
            await asyncio.wait(tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(Connection(reader, writer)), name="pd-nixl-writer")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: Connection) -> None:
        attached: _Attached | None = None
        try:
            # One that is turned away hears the end of its connection; so does one that is silent.
            with contextlib.suppress(Ended, Unclear, AgentError, asyncio.TimeoutError):
                asked = await connection.receive(nixl_pb2.NixlAttach, HANDSHAKE_S)
                known = hmac.compare_digest(asked.secret, self.shard.secret)
                if not known or len(self._serving) > MOST_WRITERS:
                    return
                attached = await self._admit((asked.instance.name, asked.instance.epoch))
                attached.agent = await asyncio.to_thread(Agent, self._pool, connection.loopback)
                await connection.send(
                    nixl_pb2.NixlPool(
                        pool_id=self.shard.pool_id,
                        pool_bytes=self._pool.size,
                        agent=attached.agent.metadata(),
                        base_address=self._pool.address,
                    )
                )
                while (await connection.receive(nixl_pb2.NixlState, SILENT_S)).attached:
                    await connection.send(self._state(True))
        finally:
            # Of its own, for nothing may keep it from being carried through.
            task = asyncio.create_task(self._end(connection, attached), name="pd-nixl-end")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _admit(self, writer: _Writer) -> _Attached:
        """Let a P write, once no earlier connection of its own lets it."""
        while (before := self._attached.get(writer)) is not None:
            before.serving.cancel()
            await before.over.wait()
        serving = asyncio.current_task()
        assert serving is not None
        attached = self._attached[writer] = _Attached(writer, serving)
        self._news(*writer, True)
        return attached

    async def _end(self, connection: Connection, attached: _Attached | None) -> None:
        if attached is not None:
            if attached.agent is not None:
                await asyncio.to_thread(attached.agent.destroy)
            del self._attached[attached.writer]
            self._news(*attached.writer, False)
            attached.over.set()
            with contextlib.suppress(Ended, Unclear):
                await connection.send(self._state(False))
        await connection.close()

    def _state(self, attached: bool) -> nixl_pb2.NixlState:
        return nixl_pb2.NixlState(pool_id=self.shard.pool_id, attached=attached)
