"""P as a process of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from pd_grpc.bench.bound_peer import Prefetched
from pd_grpc.bench.legs import BenchRequest
from pd_grpc.bench.setup import THREADS, Row, Timing
from pd_grpc.bench.timed_engine import TimedEngine
from pd_grpc.bench.zmq_peers import AsyncPeers, PreparingThreads
from pd_grpc.prefill.peer import DecodePeer
from pd_grpc.prefill.server import PrefillServer, start_prefill
from pd_grpc.protocol.config import PrefillConfig


class PrefillWorker:
    """`row` says how it carries Allocate; `routers` maps D's endpoint to its ZeroMQ ROUTER."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._config = PrefillConfig(name=spec["name"], **spec["settings"])
        timing = Timing(**spec["timing"])
        self._engine = TimedEngine(self._config, timing.steps, timing.scale)
        self._row = Row(spec["row"])
        self._routers: Mapping[str, str] = spec["routers"]
        self._carrier: PreparingThreads | AsyncPeers | Prefetched | None = None
        self._server: PrefillServer | None = None

    async def start(self) -> Mapping[str, Any]:
        if self._row in THREADS:
            self._carrier = PreparingThreads(THREADS[self._row], self._routers)
        elif self._row is Row.ZMQ_ASYNC:
            self._carrier = AsyncPeers(self._routers)
        elif self._row is Row.BOUND:
            self._carrier = Prefetched(self._config)
        peers = DecodePeer if self._carrier is None else self._carrier.peer
        self._server = await start_prefill(self._config, self._engine, peers=peers)
        return {"endpoint": self._server.endpoint}

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "stats":
            return self._stats()
        if command["do"] == "prefetch" and isinstance(self._carrier, Prefetched):
            return await self._prefetch(command["requests"])
        raise ValueError(f"do: {command['do']!r} is nothing that P does in this row")

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        if self._carrier is not None:
            self._carrier.stop()

    def _stats(self) -> Mapping[str, Any]:
        assert self._server is not None
        process = psutil.Process()
        pool = self._server.machine.placement.pool
        return {
            "threads": process.num_threads(),
            "rss_bytes": process.memory_info().rss,
            "cpu_s": sum(process.cpu_times()[:2]),
            "in_preparation": pool.in_flight,
            "granted": pool.granted,
            "chunks": self._engine.chunks_computed,
        }

    async def _prefetch(self, requests: list[Any]) -> int:
        assert self._server is not None and isinstance(self._carrier, Prefetched)
        wanted = [BenchRequest(**request) for request in requests]
        for endpoint in {request.decodes[0][1] for request in wanted}:
            those = [request for request in wanted if request.decodes[0][1] == endpoint]
            await self._carrier.fetch(self._server.runtime, endpoint, those)
        return len(wanted)
