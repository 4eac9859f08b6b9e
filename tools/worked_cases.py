"""Runs the worked cases of docs/observability.md on this machine and keeps what they showed.

python -m tools.worked_cases [CASE ...]    writes docs/observability.json; `make docs` does the rest

Each case is a system of real processes on the sim engine, some load, and the request of it that
waited longest, whose trace is read back from the servers as `pd-grpc trace` does. The metrics are
what the servers answered Prometheus with after the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pd_grpc.cli import trace
from pd_grpc.cli.cluster import ClusterPlan, LocalCluster
from pd_grpc.cli.span_tree import span_tree, sums
from pd_grpc.client import AsyncClient, Fault
from pd_grpc.protocol.endpoints import address
from tools.proto_source import ROOT

KEPT = ROOT / "docs" / "observability.json"

_HOST = "127.0.0.1"
_PIECE_BYTES = 16384
_TRACES = "64"
_SCRAPE_S = 10.0


@dataclass(frozen=True)
class Load:
    """`requests` of `prompt` tokens that ask for `answer` tokens each, `at_once` of them
    together."""

    requests: int
    at_once: int
    prompt: int
    answer: int


@dataclass(frozen=True)
class Case:
    """A system, its load, and the metrics that tell of it, by their names in Prometheus.
    `link_bytes_per_s` is what the way of the KV to D lets through."""

    flags: tuple[str, ...]
    load: Load
    metrics: tuple[str, ...]
    link_bytes_per_s: float | None = None


_STAGES = "pd_stage_duration_seconds"
_GAP = "pd_second_token_gap_seconds"
_TTFT = "gen_ai_server_time_to_first_token_seconds"

CASES: Mapping[str, Case] = {
    "healthy": Case(
        flags=("--sim-time-scale", "4"),
        load=Load(requests=4, at_once=1, prompt=1024, answer=16),
        metrics=(),
    ),
    "decode_full": Case(
        flags=("--sim-time-scale", "1", "--num-blocks", "80"),
        load=Load(requests=24, at_once=12, prompt=512, answer=64),
        metrics=(_STAGES, _GAP, _TTFT),
    ),
    "slow_link": Case(
        flags=("--sim-time-scale", "1", "--sim-head-dim", "256"),
        load=Load(requests=6, at_once=1, prompt=1024, answer=16),
        metrics=(_STAGES, "pd_transfer_duration_seconds", _GAP, _TTFT),
        link_bytes_per_s=4e6,
    ),
    "prefill_overloaded": Case(
        flags=("--sim-time-scale", "2", "--num-blocks", "4096"),
        load=Load(requests=32, at_once=16, prompt=1500, answer=4),
        metrics=(_STAGES, _GAP, _TTFT),
    ),
}


class SlowLink:
    """The way to a port of this machine, so many bytes a second for each connection."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self.port = 0
        """What is behind it."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listen; host:port."""
        server = await asyncio.start_server(self._serve, _HOST, 0)
        yield address(_HOST, server.sockets[0].getsockname()[1])
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_d, to_d = await asyncio.open_connection(_HOST, self.port)
        await asyncio.gather(self._pass(reader, to_d), self._pass(from_d, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_PIECE_BYTES):
                await asyncio.sleep(len(data) / self._rate)
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def _system(case: Case) -> AsyncIterator[LocalCluster]:
    """One router, one P, one D, with metrics and the last traces."""
    async with contextlib.AsyncExitStack() as stack:
        if case.link_bytes_per_s is not None:
            link = SlowLink(case.link_bytes_per_s)
            endpoint = await stack.enter_async_context(link.open())
            link.port = _free_port()
            os.environ |= {"PD_BULK_PORT": str(link.port), "PD_BULK_ADVERTISE": endpoint}
        plan = ClusterPlan(
            engine="sim",
            flags=(*case.flags, "--traces-kept", _TRACES),
            router_flags=("--traces-kept", _TRACES),
            prometheus=address(_HOST, 0),
        )
        cluster = LocalCluster(plan)
        try:
            await asyncio.to_thread(cluster.__enter__)
            yield cluster
        finally:
            await asyncio.to_thread(cluster.stop)
            for name in ("PD_BULK_PORT", "PD_BULK_ADVERTISE"):
                os.environ.pop(name, None)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


@dataclass
class _Asked:
    trace_id: str
    first_s: float
    error: str = ""


async def _ask_all(endpoint: str, load: Load) -> list[_Asked]:
    room, loop = asyncio.Semaphore(load.at_once), asyncio.get_running_loop()

    async def ask(client: AsyncClient, number: int) -> _Asked:
        async with room:
            began, first_s, error = loop.time(), 0.0, ""
            prompt = [3 + (number * 7919 + each) % 1000 for each in range(load.prompt)]
            generation = client.generate(
                token_ids=prompt, max_tokens=load.answer, ignore_eos=True, timeout_s=120
            )
            try:
                async for _ in generation:
                    first_s = first_s or loop.time() - began
            except Fault as fault:
                error = f"{fault.code.name} {fault.reason.value}"
            return _Asked(generation.trace_id, first_s, error)

    async with AsyncClient(endpoint) as client:
        return await asyncio.gather(*(ask(client, each) for each in range(load.requests)))


def _metrics(cluster: LocalCluster, wanted: Sequence[str]) -> list[list[str]]:
    """Rows of metric, labels, number and mean (s) of the histograms that have anything."""
    rows = []
    for instance in cluster.instances:
        with urllib.request.urlopen(
            f"http://{instance.metrics}/metrics", timeout=_SCRAPE_S
        ) as page:
            text = page.read().decode()
        for family in text_string_to_metric_families(text):
            if family.name in wanted:
                rows += _means(family)
    return sorted(rows, key=lambda row: (wanted.index(row[0]), row[1]))


def _means(family: Any) -> list[list[str]]:
    found: dict[str, dict[str, float]] = {}
    for sample in family.samples:
        labels = ", ".join(
            f"{name}={value}"
            for name, value in sample.labels.items()
            if value and name != "le" and not name.startswith(("otel_", "gen_ai_"))
        )
        found.setdefault(labels, {})[sample.name.removeprefix(family.name)] = sample.value
    return [
        [family.name, labels, f"{series['_count']:.0f}", f"{series['_sum'] / series['_count']:.3f}"]
        for labels, series in found.items()
        if series.get("_count")
    ]


async def run(case: Case) -> Mapping[str, Any]:
    """What a case shows."""
    async with _system(case) as cluster:
        asked = await _ask_all(cluster.router_endpoint, case.load)
        longest = max(asked, key=lambda each: each.first_s)
        spans = await asyncio.to_thread(
            trace.fetch_answered, cluster.router_endpoint, longest.trace_id
        )
        tree = [*span_tree(spans).plain.split("\n"), *sums(spans)]
        return {
            "flags": list(case.flags),
            "load": vars(case.load),
            "link_bytes_per_s": case.link_bytes_per_s,
            "failed": sum(bool(each.error) for each in asked),
            "trace": tree,
            "metrics": await asyncio.to_thread(_metrics, cluster, case.metrics),
        }


def main(names: Sequence[str]) -> int:
    """Run the cases and keep what they show, beside what is kept of the others."""
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for name in names or CASES:
        kept[name] = asyncio.run(run(CASES[name]))
        print(name, *kept[name]["trace"], sep="\n", file=sys.stderr)
        for row in kept[name]["metrics"]:
            print(*row, file=sys.stderr)
    text = json.dumps({name: kept[name] for name in CASES if name in kept}, indent=1)
    KEPT.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
