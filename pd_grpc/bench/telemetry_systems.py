"""One cluster for each way to observe it, side by side, and one load on one of them at a time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from pd_grpc.bench.processes import ANSWER_S, WorkerLost, WorkerProcess
from pd_grpc.bench.workload import Length
from pd_grpc.protocol.config import TelemetryConfig

SERVERS = ("router", "prefill", "decode")
SINK, CLIENT = "collector", "client"
KEPT: int = TelemetryConfig().traces_kept
"""What the servers keep by default."""
_LOOK_S = 0.02
_MARGIN_S = 30.0
_LATE_S = 10.0
"""How long spans may come after the flush that follows the last answer. A server ends those of a
call when it sees the call's end, which the client may see before."""


@dataclass(frozen=True)
class Variant:
    """A way to observe a cluster: to a collector or not, by which sampler of the SDK, and how many
    traces each server keeps."""

    description: str
    otlp: bool = False
    sampler: Mapping[str, str] = field(default_factory=dict)
    traces_kept: int = KEPT

    @property
    def records_all(self) -> bool:
        """Whether every request leaves its spans at the collector."""
        return self.otlp and self.sampler.get("OTEL_TRACES_SAMPLER") == "parentbased_always_on"


VARIANTS: Mapping[str, Variant] = {
    "off": Variant("no spans, no metrics: no exporter, and no trace is kept", traces_kept=0),
    "same": Variant(
        "as off: what differs is chance, and nothing smaller can be told", traces_kept=0
    ),
    "local": Variant("as a server starts by default: no exporter, the last traces are kept"),
    "sampled": Variant(
        "--otlp: metrics, and the spans of one request in a hundred",
        True,
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    ),
    "on": Variant(
        "--otlp: metrics, and the spans of every request",
        True,
        {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
    ),
}

ENGINE: Mapping[str, Any] = {
    "engine": "sim",
    "num_blocks": 8192,
    "max_batch": 64,
    "chunk_tokens": 2048,
    "prefix_cache": 0.0,
}
"""Of every P and D."""


@dataclass(frozen=True)
class Load:
    """Requests that are sent, `at_once` under way."""

    lengths: Sequence[Length]
    at_once: int
    limit_s: float


@dataclass(frozen=True)
class Leg:
    """One load on one cluster. `rate` is right answers a second, from the first request's
    sending to the last one's end; `cpu_s` is by process, with what was left to export then, and
    `wall_s` goes with it."""

    variant: str
    rate: float
    right: int
    wrong: list[str]
    wall_s: float
    cpu_s: Mapping[str, float]
    spans: Mapping[str, Any]


class Systems:
    """See `running_systems`."""

    def __init__(
        self,
        clusters: Mapping[str, Mapping[str, WorkerProcess]],
        sink: WorkerProcess,
        clients: Mapping[str, WorkerProcess],
    ) -> None:
        self._clusters = clusters
        self._sink = sink
        self._clients = clients
        self._taking = asyncio.Lock()

    async def prepare(self, name: str, load: Load) -> None:
        """Make the requests of `load`, and the answers they should get; ids begin with `name`."""
        requests = [(f"{name}-{i}", *each) for i, each in enumerate(load.lengths)]
        wait_s = load.limit_s + _MARGIN_S
        await asyncio.gather(
            *(client.do("prepare", wait_s, requests=requests) for client in self._clients.values())
        )

    async def run(self, variant: str, load: Load) -> Leg:
        """The load that was prepared, on one cluster."""
        servers, client = self._clusters[variant], self._clients[variant]
        workers = {**servers, SINK: self._sink, CLIENT: client}
        before, begun = _cpu_s(workers), time.monotonic()
        asked = await client.do(
            "ask",
            load.limit_s + _MARGIN_S,
            endpoint=servers["router"].endpoint,
            at_once=load.at_once,
            limit_s=load.limit_s,
        )
        await _flush(servers)
        wall_s = time.monotonic() - begun
        after = _cpu_s(workers)
        right = len(asked["ended_s"])
        return Leg(
            variant,
            right / max(asked["ended_s"], default=math.inf),
            right,
            asked["wrong"],
            wall_s,
            {name: after[name] - before[name] for name in after},
            await self._take(variant, right),
        )

    async def run_together(self, load: Load) -> list[Leg]:
        """The load that was prepared, on every cluster at the same time. What the collector uses is
        not told apart, and so is 0."""
        legs = await asyncio.gather(*(self.run(variant, load) for variant in self._clusters))
        return [replace(leg, cpu_s={**leg.cpu_s, SINK: 0.0}) for leg in legs]

    async def _take(self, variant: str, requests: int) -> Mapping[str, Any]:
        """What the collector got of it, when nothing is missing any more of `requests` that are
        recorded, or `_LATE_S` have gone by. One may ask the collector at a time."""
        wanted = requests if VARIANTS[variant].records_all else 0
        until = time.monotonic() + _LATE_S
        async with self._taking:
            while time.monotonic() < until:
                seen = await self._sink.do("look", listener=variant)
                if seen["traces"] >= wanted and not seen["missing"]:
                    break
                await asyncio.sleep(_LOOK_S)
                await _flush(self._clusters[variant])
            counted: Mapping[str, Any] = await self._sink.do("take", listener=variant)
        return counted


async def _flush(servers: Mapping[str, WorkerProcess]) -> None:
    await asyncio.gather(*(server.do("flush") for server in servers.values()))


def _cpu_s(workers: Mapping[str, WorkerProcess]) -> dict[str, float]:
    return {name: sum(psutil.Process(w.pid).cpu_times()[:2]) for name, w in workers.items()}


@contextlib.asynccontextmanager
async def running_systems(
    variants: Mapping[str, Variant],
    settings: Mapping[str, Any],
    client_settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[Systems]:
    """Start a cluster of one router, P and D for each variant, with `settings` for each P and D, a
    client for each, and a collector; stop them at the end.

    A client knows the answers of an engine of `client_settings`, or of the clusters' own.
    WorkerLost when the first answers are wrong already.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def launch(role: str) -> WorkerProcess:
            worker = await WorkerProcess.launch(role)
            stack.push_async_callback(worker.stop)
            return worker

        # They are stopped in the opposite order: who is called goes last.
        sink = await launch("sink")
        await sink.start(listeners=list(variants))
        clusters = {}
        for name, variant in variants.items():
            workers = {role: await launch("observed-server") for role in reversed(SERVERS)}
            otlp = sink.about["endpoints"][name] if variant.otlp else ""
            await _start(name, workers, variant, otlp, settings)
            clusters[name] = workers
        clients = {name: await launch("asker") for name in variants}
        for client in clients.values():
            await client.start(settings=dict(client_settings or settings))
        systems = Systems(clusters, sink, clients)
        await _warm_up(systems, list(variants))
        yield systems


async def _start(
    name: str,
    workers: Mapping[str, WorkerProcess],
    variant: Variant,
    otlp: str,
    settings: Mapping[str, Any],
) -> None:
    async def begin(role: str, own: Mapping[str, Any]) -> None:
        common = {"name": f"{name}-{role}", "log_level": "error", "otlp": otlp}
        kept = {"traces_kept": variant.traces_kept}
        await workers[role].start(
            role=role, environment=dict(variant.sampler), settings={**common, **kept, **own}
        )

    await asyncio.gather(*(begin(role, settings) for role in ("prefill", "decode")))
    ends = {role: [workers[role].endpoint] for role in ("prefill", "decode")}
    await begin("router", {"engine": "sim", **ends})
    until = time.monotonic() + ANSWER_S
    while not await workers["router"].do("ready"):
        if time.monotonic() > until:
            raise WorkerLost("the router does not find its instances")
        await asyncio.sleep(_LOOK_S)


async def _warm_up(systems: Systems, variants: Sequence[str]) -> None:
    """Open every connection."""
    load = Load([Length(64, 8)] * 16, 4, ANSWER_S)
    await systems.prepare("warm-up", load)
    for variant in variants:
        leg = await systems.run(variant, load)
        if leg.wrong:
            raise WorkerLost(f"the warm-up of {variant} failed: {leg.wrong[0]}")
