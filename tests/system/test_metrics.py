"""Every metric of the catalog, as real servers record it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    HistogramDataPoint,
    InMemoryMetricReader,
    NumberDataPoint,
)

from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.telemetry import names
from pd_grpc.telemetry.instruments import CATALOG
from pd_grpc.v1 import inference_pb2, sampling_pb2
from tests.cluster import Cluster, cluster
from tests.system.asking import ask as ask_one
from tests.system.asking import request
from tests.waiting import until

Point = NumberDataPoint | HistogramDataPoint
AFTER_FAULTS = {
    names.METRIC_REFUSALS,
    names.METRIC_WASTED_TOKENS,
    names.METRIC_LEASE_EXPIRED,
    names.METRIC_ROUTER_RETRIES,
    names.METRIC_ROUTER_CONTINUATIONS,
    names.METRIC_ROUTER_RETRIES_REFUSED,
}
"""What a day without a fault does not show."""

_OF_CALLS = {names.METRIC_RPC_CLIENT_DURATION, names.METRIC_RPC_SERVER_DURATION}

BY_DECODE = {
    names.METRIC_PREPARE_IN_FLIGHT,
    names.METRIC_PREPARE_WAITING,
    names.METRIC_PREPARE_BREAKER_OPEN,
}
"""What P shows of a D only while it has to do with it: tests/prefill/test_prepare_metrics.py."""


class Read:
    """What a reader sees now."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        data = reader.get_metrics_data()
        scopes = [] if data is None else [s for r in data.resource_metrics for s in r.scope_metrics]
        self.metrics: dict[str, list[Any]] = {}
        self._of: dict[int, Any] = {}
        for scope in scopes:
            for metric in scope.metrics:
                self.metrics.setdefault(metric.name, []).append(metric)
                self._of[id(metric)] = (scope.scope.attributes or {}).get("pd.instance")

    def points(self, name: str, instance: str = "", **labels: str) -> list[Any]:
        """Those of one instance, or of all, with these labels among theirs."""
        metrics = [m for m in self.metrics.get(name, ()) if instance in ("", self._of[id(m)])]
        found = [p for metric in metrics for p in metric.data.data_points]
        return [p for p in found if labels.items() <= dict(p.attributes or {}).items()]

    def count(self, name: str, **labels: str) -> int:
        """Measurements of a histogram."""
        return sum(point.count for point in self.points(name, **labels))

    def value(self, name: str, **labels: str) -> float:
        """The sum of counters or gauges."""
        return float(sum(point.value for point in self.points(name, **labels)))


async def ask(running: Cluster, n: int = 1, prompt: int = 50, max_tokens: int = 4) -> None:
    async def one(stub: Any, seed: int) -> None:
        message = request(
            list(range(3 + seed, 3 + seed + prompt)),
            Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        async for _ in stub.Generate(message, timeout=30):
            pass

    async with running.client() as stub:
        await asyncio.gather(*(one(stub, seed) for seed in range(n)))


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


async def test_a_day_without_a_fault_shows_every_metric_of_the_catalog(
    reader: InMemoryMetricReader,
) -> None:
    async with cluster(meters=MeterProvider([reader])) as running:
        await ask(running, n=3)
        await until(lambda: Read(reader).count(names.METRIC_REQUEST_DURATION) == 3)
        read = Read(reader)
    shown = {name for name in read.metrics if read.points(name)}
    assert shown >= set(CATALOG) - AFTER_FAULTS - BY_DECODE
    for name, metrics in read.metrics.items():
        about = CATALOG[name]
        for metric in metrics:
            assert (metric.unit, metric.description) == (about.unit, about.description), name
        for point in read.points(name):
            assert set(point.attributes or {}) <= set(about.labels), name
            if isinstance(point, HistogramDataPoint):
                assert tuple(point.explicit_bounds) == about.bounds, name
    for stage in ("route", "queue", "prepare", "compute", "send", "transfer", "decode"):
        assert read.count(names.METRIC_STAGE_DURATION, stage=stage) >= 3, stage
    assert read.count(names.METRIC_TTFT) == read.count(names.METRIC_TPOT) == 3
    assert read.count(names.METRIC_SECOND_TOKEN_GAP) == 3
    assert read.count(names.METRIC_TTFT, **{names.ATTR_GEN_AI_OPERATION: "text_completion"}) == 3
    assert read.value(names.METRIC_DECISION, decision="disaggregated") == 3
    for reason in Reason:
        counted = read.points(names.METRIC_REFUSALS, reason=reason.value)
        assert [point.value for point in counted] == [0, 0, 0], "nothing to count from"
    sent = read.value(names.METRIC_TRANSFER_BYTES, role="prefill")
    assert sent == read.value(names.METRIC_TRANSFER_BYTES, role="decode") > 0
    for role, pool in (("prefill", running.prefills[0].pool), ("decode", running.decodes[0].pool)):
        assert read.value(names.METRIC_BLOCKS, role=role) == pool.total
        back = [read.value(names.METRIC_BLOCKS, role=role, state=s) for s in ("free", "cached")]
        assert sum(back) == pool.total and back[1] > 0
        # Three prompts of three whole blocks, of which P looks up what is before the last token.
        assert read.value(names.METRIC_PREFIX_LOOKUP_TOKENS, role=role) == 3 * 48
        assert read.value(names.METRIC_PREFIX_HIT_TOKENS, role=role) == 0


async def test_what_the_prefix_cache_spared_is_counted(reader: InMemoryMetricReader) -> None:
    async with cluster(meters=MeterProvider([reader])) as running:
        for _ in range(2):
            await ask(running, prompt=64)
        read = Read(reader)
    for role, hits in (("prefill", 48), ("decode", 64)):
        assert read.value(names.METRIC_PREFIX_HIT_TOKENS, role=role) == hits
    assert read.value(names.METRIC_PREFIX_LOOKUP_TOKENS, role="prefill") == 2 * 48
    assert read.value(names.METRIC_PREFIX_LOOKUP_TOKENS, role="decode") == 2 * 64


async def test_refusals_count_by_reason_and_no_request_makes_a_label_of_its_own(
    reader: InMemoryMetricReader,
) -> None:
    settings: Mapping[str, Any] = {"num_blocks": 8}
    async with cluster(meters=MeterProvider([reader]), **settings) as running:
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(running, prompt=200)
        await ask(running, n=8)
        await running.settled()
        before = _series(Read(reader))
        await ask(running, n=8)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(running, prompt=200)
        await running.settled()
        read = Read(reader)
    assert read.value(names.METRIC_REFUSALS, instance="router", reason="TOO_LARGE") == 6
    grown = {name: n - before[name] for name, n in _series(read).items() if n != before[name]}
    # The end of a call may be seen as OK or as cancelled, and by its own end only later.
    assert grown.keys() <= _OF_CALLS and sum(grown.values()) <= 4, grown


async def test_a_conversation_counts_as_a_chat(reader: InMemoryMetricReader) -> None:
    said = inference_pb2.ChatMessage(role="user", content="hello")
    message = inference_pb2.GenerateRequest(
        messages=inference_pb2.ChatMessages(messages=[said]),
        sampling=sampling_pb2.SamplingParams(max_tokens=2),
    )
    async with cluster(meters=MeterProvider([reader])) as running, running.client() as stub:
        await ask_one(stub, message)
        await until(lambda: Read(reader).count(names.METRIC_REQUEST_DURATION) == 1)
        read = Read(reader)
    (point,) = read.points(names.METRIC_REQUEST_DURATION)
    about = dict(point.attributes)
    assert about.pop(names.ATTR_GEN_AI_MODEL)
    assert about == {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "pd_grpc"}


async def test_a_lease_that_nobody_renews_counts_on_both_sides(
    reader: InMemoryMetricReader,
) -> None:
    """P computes for longer than the lease, and its first heartbeat is later than that."""
    times: Mapping[str, Any] = {"heartbeat_s": 5.0, "lease_s": 0.5, "sim_time_scale": 200.0}
    async with cluster(meters=MeterProvider([reader]), **times) as running:
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(running)
        await until(lambda: Read(reader).value(names.METRIC_LEASE_EXPIRED) == 2)
        read = Read(reader)
        assert read.value(names.METRIC_REFUSALS, role="decode", reason="LEASE_EXPIRED") == 1
    assert read.value(names.METRIC_LEASE_EXPIRED, side="decode") == 1
    assert read.value(names.METRIC_LEASE_EXPIRED, side="prefill") == 1


async def test_blocks_of_a_step_whose_request_has_ended_are_quarantined_until_its_end(
    reader: InMemoryMetricReader,
) -> None:
    def blocks(role: str, state: str) -> float:
        return Read(reader).value(names.METRIC_BLOCKS, role=role, state=state)

    async with cluster(meters=MeterProvider([reader]), sim_time_scale=100.0) as running:
        for role, state in (("prefill", "computing"), ("decode", "decoding")):
            task = asyncio.create_task(ask(running, max_tokens=50))
            await until(partial(lambda role, state: blocks(role, state) > 0, role, state))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(partial(lambda role: blocks(role, "quarantined") > 0, role))
            for each in ("prefill", "decode"):
                await until(partial(lambda r: blocks(r, "free") + blocks(r, "cached") == 256, each))


async def test_tokens_computed_for_nobody_are_counted(reader: InMemoryMetricReader) -> None:
    async with cluster(meters=MeterProvider([reader]), sim_time_scale=20.0) as running:
        task = asyncio.create_task(ask(running, prompt=600))
        await until(lambda: Read(reader).value(names.METRIC_BLOCKS, state="computing") > 0)
        [record] = running.prefills[0].machine.requests.in_flight.values()
        await until(lambda: record.computed > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: Read(reader).value(names.METRIC_WASTED_TOKENS) > 0)
        wasted = Read(reader).value(names.METRIC_WASTED_TOKENS, reason="CLIENT_GONE")
    assert wasted % running.prefills[0].machine._config.chunk_tokens == 0
    assert wasted == record.computed or wasted == record.computed - 64


def _series(read: Read) -> dict[str, int]:
    return {name: len(read.points(name)) for name in read.metrics}
