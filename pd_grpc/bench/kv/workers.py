"""The processes that KV is moved between."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pd_grpc.bench.kv.pool import KvPool
from pd_grpc.bench.kv.ways import WAYS, Landing, Sending
from pd_grpc.blocks.pool import Holding


class _Usage:
    """What this process has used since `begin`, and at the most since it was made."""

    def __init__(self) -> None:
        # What making the pool has left behind would hide as much of what a transfer takes.
        ctypes.CDLL(None).malloc_trim(0)
        self._memory = _status_bytes("RssAnon")
        self._cpu_s = 0.0

    def begin(self) -> None:
        # 5 sets the peak back to what is resident now: proc(5), clear_refs.
        Path("/proc/self/clear_refs").write_text("5")
        self._cpu_s = time.process_time()

    def so_far(self) -> dict[str, float]:
        """CPU seconds, and bytes that were resident beyond what was when the pool was filled. What
        is shared is a pool, of which more and more pages are mapped, and does not count; nor do the
        pages of libraries, which the kernel takes and gives back as it likes."""
        cpu_s = time.process_time() - self._cpu_s
        most = _status_bytes("VmHWM") - _status_bytes("RssShmem") - _status_bytes("RssFile")
        return {"cpu_s": cpu_s, "peak_bytes": max(0, most - self._memory)}


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"{field} is not in /proc/self/status: the benchmark needs Linux")


class KvReceiver:
    """Has a pool that KV is to land in, by any of the `ways`."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._ends: dict[str, Landing] = {name: WAYS[name].landing() for name in spec["ways"]}
        shared = any(WAYS[name].shared for name in spec["ways"])
        self._pool = KvPool(spec["num_blocks"], seed=None, shared=shared)
        self._settings = spec["settings"]
        self._holdings: list[Holding] = []

    async def start(self) -> Mapping[str, Any]:
        about = {
            name: dict(await end.start(self._pool, self._settings))
            for name, end in self._ends.items()
        }
        self._usage = _Usage()
        return about

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "expect":
            names = command["names"]
            self._holdings = self._pool.take(
                len(names), command["blocks"], command["fragmented"], command["seed"], "landing"
            )
            self._pool.poison(self._tables)
            self._usage.begin()
            self._end = self._ends[command["way"]]
            await self._end.expect(names, self._tables)
            return True
        if command["do"] == "landed":
            await self._end.landed()
            usage = self._usage.so_far()
            # What copies within the sender has compared it already.
            digests = self._pool.digests(self._tables) if self._end.lands else None
            self._pool.give_back(self._holdings)
            return {**usage, "digests": digests}
        if command["do"] == "digests":
            return self._pool.digests(self._tables)
        raise ValueError(f"do: {command['do']!r} is nothing that a receiver does")

    async def stop(self) -> None:
        for end in self._ends.values():
            await end.stop()

    @property
    def _tables(self) -> list[list[int]]:
        return [list(holding.blocks) for holding in self._holdings]


class KvSender:
    """Has a pool of random bytes, and sends from it by any of the `ways` to who has said
    `addresses`."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._ends: dict[str, Sending] = {name: WAYS[name].sending() for name in spec["ways"]}
        self._pool = KvPool(spec["num_blocks"], seed=spec["seed"])
        self._settings = spec["settings"]
        self._addresses = spec["addresses"]

    async def start(self) -> Mapping[str, Any]:
        for name, end in self._ends.items():
            await end.start(self._pool, self._settings, self._addresses[name])
        self._usage = _Usage()
        return {}

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "send":
            names = command["names"]
            holdings = self._pool.take(
                len(names), command["blocks"], command["fragmented"], command["seed"], "sending"
            )
            tables = [list(holding.blocks) for holding in holdings]
            digests = self._pool.known_digests(tables)
            self._usage.begin()
            took_s = await self._ends[command["way"]].send(names, tables)
            usage = self._usage.so_far()
            await self._ends[command["way"]].check(tables)
            self._pool.give_back(holdings)
            return {**usage, "took_s": took_s, "digests": digests}
        raise ValueError(f"do: {command['do']!r} is nothing that a sender does")

    async def stop(self) -> None:
        for end in self._ends.values():
            await end.stop()
