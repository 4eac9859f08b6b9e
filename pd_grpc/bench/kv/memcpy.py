"""Moving bytes without moving them anywhere: the bound of what shares memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pd_grpc.bench.kv import ways
from pd_grpc.bench.kv.pool import KvPool
from pd_grpc.bench.kv.ways import Tables
from pd_grpc.bench.zmq_wire import load


class Landing:
    """There is nobody at the other end."""

    def __init__(self, lands: bool, threads: int | None = None) -> None:
        self.lands = False

    async def start(self, pool: KvPool, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    async def expect(self, names: Sequence[str], tables: Tables) -> None:
        pass

    async def landed(self) -> None:
        pass

    async def stop(self) -> None:
        pass


class Sending(ways.Sending):
    """Copies to memory of its own, by so many threads; what it has copied is compared."""

    def __init__(self, threads: int | None = None) -> None:
        self._torch = load("torch")
        self._threads = threads or self._torch.get_num_threads()
        self._from: Any = None
        self._to: Any = None

    async def start(
        self, pool: KvPool, settings: Mapping[str, Any], address: Mapping[str, Any]
    ) -> None:
        self._pool = pool
        self._from = self._torch.from_numpy(pool.bytes)
        self._to = self._torch.full_like(self._from, 0)

    async def send(self, names: Sequence[str], tables: Tables) -> list[float]:
        self._torch.set_num_threads(self._threads)
        found = []
        for table in tables:
            source, target = self._tensors(table)
            began = time.perf_counter()
            target.copy_(source)
            found.append(time.perf_counter() - began)
        return found

    async def check(self, tables: Tables) -> None:
        """Compare, and wipe it, lest it passes for the next copy."""
        for table in tables:
            source, target = self._tensors(table)
            if not self._torch.equal(source, target):
                raise RuntimeError("memcpy: the copy differs")
            target.zero_()

    def _tensors(self, table: Sequence[int]) -> tuple[Any, Any]:
        size = self._pool.region(table).nbytes
        start = table[0] * (size // len(table))
        return self._from[start : start + size], self._to[start : start + size]

    async def stop(self) -> None:
        pass
