"""Moving bytes over ZeroMQ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pd_grpc.bench.kv import ways
from pd_grpc.bench.kv.pool import MIB, KvPool
from pd_grpc.bench.kv.ways import Tables
from pd_grpc.bench.zmq_wire import LOOPBACK, load

_LIMIT_MS = 60_000


def _socket(context: Any, kind: int) -> Any:
    made = context.socket(kind)
    made.linger = 0
    made.rcvtimeo = made.sndtimeo = _LIMIT_MS
    return made


class Landing:
    """PULL for what comes, PUSH for the word that all of it has."""

    def __init__(self, lands: bool) -> None:
        zmq = load("zmq")
        self.lands = lands
        self._context = zmq.Context()
        self._pull, self._push = (_socket(self._context, kind) for kind in (zmq.PULL, zmq.PUSH))
        self._taking: asyncio.Task[None] | None = None

    async def start(self, pool: KvPool, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        self._pool = pool
        ports = {
            name: each.bind_to_random_port(LOOPBACK)
            for name, each in (("data", self._pull), ("done", self._push))
        }
        return ports

    async def expect(self, names: Sequence[str], tables: Tables) -> None:
        (table,) = tables
        self._taking = asyncio.create_task(asyncio.to_thread(self._take, self._pool.region(table)))

    async def landed(self) -> None:
        assert self._taking is not None
        await self._taking

    async def stop(self) -> None:
        self._context.destroy()

    def _take(self, region: memoryview) -> None:
        at = 0
        while at < region.nbytes:
            frame = self._pull.recv(copy=False)
            size = len(frame)
            if self.lands:
                region[at : at + size] = frame.buffer
            at += size
        self._push.send(b"1")


class Sending(ways.Sending):
    """PUSH for what is sent."""

    def __init__(self) -> None:
        zmq = load("zmq")
        self._context = zmq.Context()
        self._pull, self._push = (_socket(self._context, kind) for kind in (zmq.PULL, zmq.PUSH))

    async def start(
        self, pool: KvPool, settings: Mapping[str, Any], address: Mapping[str, Any]
    ) -> None:
        self._pool = pool
        self._push.connect(f"{LOOPBACK}:{address['data']}")
        self._pull.connect(f"{LOOPBACK}:{address['done']}")

    async def send(self, names: Sequence[str], tables: Tables) -> list[float]:
        (table,) = tables
        return [await asyncio.to_thread(self._send, self._pool.region(table))]

    async def stop(self) -> None:
        self._context.destroy()

    def _send(self, region: memoryview) -> float:
        began = time.perf_counter()
        for at in range(0, region.nbytes, MIB):
            self._push.send(region[at : at + MIB], copy=False)
        self._pull.recv()
        return time.perf_counter() - began
