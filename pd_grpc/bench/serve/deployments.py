"""The servers that are compared, as `pd-grpc up` starts them, side by side, and one client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from pd_grpc.bench.processes import WorkerLost, WorkerProcess
from pd_grpc.bench.serve.load import Request
from pd_grpc.bench.serve.timing import Heard
from pd_grpc.cli.cluster import ClusterError, ClusterPlan, LocalCluster

CORES = 2
"""What the deployments share."""
AGGREGATED, APART, WIDE = "aggregated", "1p1d", "1p1d_wide"
CLIENT = "client"
_MARGIN_S = 30.0


@dataclass(frozen=True)
class Mode:
    """A way to serve; `threads` are torch's in each of its engines."""

    description: str
    aggregated: bool
    threads: int


MODES: Mapping[str, Mode] = {
    AGGREGATED: Mode("a router and one D, which prefills itself, with two threads", True, CORES),
    APART: Mode("a router, one P and one D, with one thread each", False, CORES // 2),
    WIDE: Mode("as 1p1d, with two threads each: together twice the cores", False, CORES),
}


@dataclass(frozen=True)
class Run:
    """A load on one deployment: the answers in the order of the requests, how long it took, and the
    processor time of each process."""

    mode: str
    answers: Sequence[Heard]
    wall_s: float
    cpu_s: Mapping[str, float]


class Deployments:
    """See `running_deployments`."""

    def __init__(self, clusters: Mapping[str, LocalCluster], client: WorkerProcess) -> None:
        self._clusters = clusters
        self._client = client

    async def longest(self) -> int:
        """Tokens of prompt and answer that the model takes."""
        return int(await self._client.do("model", router=AGGREGATED))

    async def open(self, mode: str, requests: Sequence[Request], timeout_s: float) -> Run:
        """Every request at its time; none may take longer than `timeout_s`."""
        return await self._run(mode, "open", requests, timeout_s, requests[-1].at_s)

    async def closed(
        self, mode: str, requests: Sequence[Request], at_once: int, timeout_s: float
    ) -> Run:
        """`at_once` under way until all are done; none may take longer than `timeout_s`."""
        rounds = -(-len(requests) // at_once)
        return await self._run(
            mode, "closed", requests, timeout_s, rounds * timeout_s, at_once=at_once
        )

    async def rank(self, prompt: Sequence[int], answer: Sequence[int]) -> dict[int, float]:
        """The likeliest tokens after an answer so far, by their log-probabilities, as the
        aggregated D computes them when it has nothing else to do."""
        ranked = await self._client.do("rank", router=AGGREGATED, prompt=prompt, answer=answer)
        return {int(token): logprob for token, logprob in ranked.items()}

    async def _run(
        self,
        mode: str,
        kind: str,
        requests: Sequence[Request],
        timeout_s: float,
        lasts_s: float,
        **more: Any,
    ) -> Run:
        pids = {**self._clusters[mode].processes, CLIENT: self._client.pid}
        before, begun = _cpu_s(pids), time.monotonic()
        heard = await self._client.do(
            kind,
            lasts_s + timeout_s + _MARGIN_S,
            router=mode,
            requests=[asdict(request) for request in requests],
            within_s=timeout_s,
            **more,
        )
        wall_s, after = time.monotonic() - begun, _cpu_s(pids)
        spent = {name: after[name] - before[name] for name in pids}
        by_name = {each["name"]: Heard.of_wire(each) for each in heard}
        return Run(mode, [by_name[request.name] for request in requests], wall_s, spent)


def _cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """WorkerLost when one of them has ended."""
    try:
        return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
    except psutil.NoSuchProcess as error:
        raise WorkerLost(f"a server has ended: {error}") from error


@contextlib.asynccontextmanager
async def running_deployments(
    modes: Sequence[str], engine: str, model: str, flags: Sequence[str]
) -> AsyncIterator[Deployments]:
    """Start each of these, and a client; stop them at the end. `flags` go to
    every P and D. WorkerLost when one does not start."""
    async with contextlib.AsyncExitStack() as stack:
        clusters = {name: LocalCluster(_plan(MODES[name], engine, model, flags)) for name in modes}
        # One is waiting where another loads.
        started = await asyncio.gather(
            *(asyncio.to_thread(cluster.__enter__) for cluster in clusters.values()),
            return_exceptions=True,
        )
        for cluster in (each for each in started if isinstance(each, LocalCluster)):
            stack.push_async_callback(asyncio.to_thread, cluster.__exit__, None, None, None)
        for name, came in zip(modes, started, strict=True):
            if isinstance(came, ClusterError):
                raise WorkerLost(f"{name}: {came}") from came
            if isinstance(came, BaseException):
                raise came
        client = await WorkerProcess.launch("serve-client")
        stack.push_async_callback(client.stop)
        await client.start(
            routers={name: cluster.router_endpoint for name, cluster in clusters.items()}
        )
        yield Deployments(clusters, client)


def _plan(mode: Mode, engine: str, model: str, flags: Sequence[str]) -> ClusterPlan:
    return ClusterPlan(
        engine=engine,
        model=model,
        aggregated=mode.aggregated,
        flags=("--log-level", "error", "--threads", str(mode.threads), *flags),
        router_flags=("--log-level", "error"),
    )
