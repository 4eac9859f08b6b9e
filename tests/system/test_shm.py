"""P and D that share memory: the same answers, by name, and inline where it does not get there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.telemetry import names
from pd_grpc.transport.shm.lender import Lender
from pd_grpc.v1 import layout_pb2
from tests.cluster import SIM, Cluster, cluster
from tests.system.asking import Reply, ask, random_request, request

INLINE, SHM = layout_pb2.TRANSPORT_INLINE, layout_pb2.TRANSPORT_SHM
SHARED: dict[str, Any] = {"transports": ("shm", "inline")}
AT_ONCE = 16


async def answers(running: Cluster, seeds: range) -> list[Reply]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with running.client() as stub:

        async def one(seed: int) -> Reply:
            async with gate:
                return await ask(stub, request(*random_request(seed)))

        return await asyncio.gather(*(one(seed) for seed in seeds))


def expected(seeds: range) -> list[list[int]]:
    config = DecodeConfig(**SIM)
    return [sim_answer(*random_request(seed), config) for seed in seeds]


def transports(running: Cluster) -> list[int]:
    """What each session of each P goes by."""
    return [s.welcome.transport for p in running.prefills for s in p.machine.conversations.all()]


@pytest.mark.timeout(120)
async def test_answers_over_shared_memory_are_those_of_the_aggregated_server() -> None:
    seeds = range(120)
    async with cluster(**SHARED, decode_settings={"audit_every": 2}) as apart:
        disaggregated = await answers(apart, seeds)
        assert transports(apart) == [SHM]
    async with cluster(aggregated=True) as together:
        aggregated = await answers(together, seeds)
    assert [r.essence for r in disaggregated] == [r.essence for r in aggregated]
    assert [r.token_ids for r in disaggregated] == expected(seeds)


@pytest.mark.timeout(120)
async def test_two_prefills_and_two_decodes_share_memory_each_with_each() -> None:
    seeds = range(48)
    async with cluster(prefills=2, decodes=2, **SHARED) as running:
        replies = await answers(running, seeds)
        assert transports(running) == [SHM] * 4
    assert [r.token_ids for r in replies] == expected(seeds)


@pytest.mark.timeout(120)
async def test_a_small_pool_is_used_again_and_again_over_shared_memory() -> None:
    seeds = range(60)
    async with cluster(**SHARED, decode_settings={"num_blocks": 24}) as running:
        replies = await answers(running, seeds)
        assert transports(running) == [SHM]
    assert [r.token_ids for r in replies] == expected(seeds)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (("inline",), ("shm", "inline")),
        (("shm", "inline"), ("inline",)),
        (("shm",), ("inline", "shm")),
    ],
)
async def test_a_pair_of_which_one_knows_or_likes_inline_alone_goes_inline(
    prefill: tuple[str, ...], decode: tuple[str, ...]
) -> None:
    async with cluster(
        prefill_settings={"transports": prefill}, decode_settings={"transports": decode}
    ) as running:
        replies = await answers(running, range(8))
        assert transports(running) == [INLINE]
    assert [r.token_ids for r in replies] == expected(range(8))


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket that D names is none of this host, as it would be between two."""
    monkeypatch.setattr(Lender, "start", lambda self, news: None)


async def test_what_does_not_get_p_there_is_left_and_inline_serves(
    unreachable: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        async with cluster(**SHARED) as running:
            replies = await answers(running, range(8))
            assert transports(running) == [INLINE]
    assert [r.token_ids for r in replies] == expected(range(8))
    said = [r.getMessage() for r in caplog.records if "no KV by shm" in r.getMessage()]
    assert said and "Connection refused" in said[0]


async def test_spans_and_metrics_name_the_transport() -> None:
    for chosen, settings in (("shm", SHARED), ("inline", {})):
        spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        reader = InMemoryMetricReader()
        async with cluster(provider=provider, meters=MeterProvider([reader]), **settings) as c:
            await answers(c, range(3))
            await c.settled()
            counted = points(reader)
        named = {
            (span.name, span.attributes[names.ATTR_TRANSPORT])
            for span in spans.get_finished_spans()
            if span.attributes and names.ATTR_TRANSPORT in span.attributes
        }
        assert named == {(names.SPAN_SEND, chosen), (names.SPAN_RECEIVE, chosen)}
        for metric in (names.METRIC_TRANSFER_BYTES, names.METRIC_TRANSFER_DURATION):
            assert counted[metric] == {("prefill", chosen), ("decode", chosen)}


def points(reader: InMemoryMetricReader) -> dict[str, set[tuple[str, str]]]:
    """For each metric that has a transport: the roles and transports that were counted."""
    found: dict[str, set[tuple[str, str]]] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    about = dict(point.attributes or {})
                    if names.ATTR_METRIC_TRANSPORT in about:
                        pair = str(about["role"]), str(about[names.ATTR_METRIC_TRANSPORT])
                        found.setdefault(metric.name, set()).add(pair)
    return found
