"""Moving bytes over a plain socket."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pd_grpc.bench.kv import ways
from pd_grpc.bench.kv.pool import KvPool
from pd_grpc.bench.kv.ways import Tables

_LIMIT_S = 60.0
_HOST = "127.0.0.1"


class Landing:
    """Takes one transfer on one connection, and says that it has it with one byte."""

    def __init__(self, lands: bool) -> None:
        self.lands = lands
        self._listener = socket.create_server((_HOST, 0))
        self._listener.settimeout(_LIMIT_S)
        self._connection: socket.socket | None = None
        self._taking: asyncio.Task[None] | None = None

    async def start(self, pool: KvPool, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        self._pool = pool
        return {"port": self._listener.getsockname()[1]}

    async def expect(self, names: Sequence[str], tables: Tables) -> None:
        (table,) = tables
        self._taking = asyncio.create_task(asyncio.to_thread(self._take, self._pool.region(table)))

    async def landed(self) -> None:
        assert self._taking is not None
        await self._taking

    async def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()

    def _take(self, region: memoryview) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(_LIMIT_S)
        at = 0
        while at < region.nbytes:
            got = self._connection.recv_into(region[at:])
            if not got:
                raise RuntimeError("tcp: the sender has closed the connection")
            at += got
        self._connection.sendall(b"1")


class Sending(ways.Sending):
    """One connection for all that is sent."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None

    async def start(
        self, pool: KvPool, settings: Mapping[str, Any], address: Mapping[str, Any]
    ) -> None:
        self._pool = pool
        self._connection = socket.create_connection((_HOST, address["port"]), _LIMIT_S)

    async def send(self, names: Sequence[str], tables: Tables) -> list[float]:
        (table,) = tables
        return [await asyncio.to_thread(self._send, self._pool.region(table))]

    async def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _send(self, region: memoryview) -> float:
        assert self._connection is not None
        began = time.perf_counter()
        self._connection.sendall(region)
        if self._connection.recv(1) != b"1":
            raise RuntimeError("tcp: the receiver has closed the connection")
        return time.perf_counter() - began
