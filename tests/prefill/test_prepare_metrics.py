"""What the prepare pool shows of itself: to a reader of metrics and to an operator."""

from __future__ import annotations

import asyncio

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import DataPointT, HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.metrics.export import NumberDataPoint as Number

from pd_grpc.engine.sim import SimEngine
from pd_grpc.prefill.server import PrefillServer, start_prefill
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.v1 import admin_pb2
from tests.prefill.cluster import SMALL, Cluster, request_to, running
from tests.waiting import until

NOBODY = "127.0.0.1:1"


async def measured(
    cluster: Cluster, **settings: object
) -> tuple[PrefillServer, InMemoryMetricReader]:
    """A P whose metrics can be read."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    config = PrefillConfig.model_validate({**SMALL, **settings})
    p = await start_prefill(config, SimEngine(config), meter_provider=provider)
    cluster.prefills.append(p)
    cluster.pools.append(p.pool)
    return p, reader


def points(reader: InMemoryMetricReader, name: str) -> list[DataPointT]:
    """Every point of one metric, read now."""
    data = reader.get_metrics_data()
    found = [] if data is None else data.resource_metrics
    metrics = [m for r in found for scope in r.scope_metrics for m in scope.metrics]
    return [point for m in metrics if m.name == name for point in m.data.data_points]


def by_decode(reader: InMemoryMetricReader, name: str) -> dict[object, float]:
    values: dict[object, float] = {}
    for point in points(reader, name):
        assert isinstance(point, Number) and point.attributes is not None
        values[point.attributes["decode"]] = point.value
    return values


async def test_gauges_tell_what_asks_waits_and_is_ready_for_each_d() -> None:
    async with running() as cluster:
        p, reader = await measured(cluster, prepare_window=2)
        full, free = await cluster.decode(), await cluster.decode()
        taken = full.pool.reserve(full.pool.free, owner="the test")
        held = p.pool.reserve(p.pool.free, owner="the test")
        pool = p.machine.placement.pool
        stuck = [request_to(full, random_seed=n) for n in range(5)]
        legs = [asyncio.create_task(cluster.run(p, full, r)) for r in stuck]
        ready = request_to(free)
        legs.append(asyncio.create_task(cluster.run(p, free, ready)))
        await until(lambda: pool.granted == 1 and pool.waiting_for(full.endpoint) == 3)
        assert by_decode(reader, "pd.prepare.in_flight") == {full.endpoint: 2, free.endpoint: 0}
        assert by_decode(reader, "pd.prepare.waiting") == {full.endpoint: 3, free.endpoint: 0}
        assert [n.value for n in points(reader, "pd.prepare.ready") if isinstance(n, Number)] == [1]
        taken.release()
        held.release()
        full.runtime.wake()
        p.runtime.wake()
        await asyncio.gather(*legs)
        assert by_decode(reader, "pd.prepare.in_flight") == {}


async def test_the_histogram_counts_every_wait_by_how_it_ended() -> None:
    async with running() as cluster:
        p, reader = await measured(cluster)
        d = await cluster.decode()
        for n in range(3):
            await cluster.run(p, d, request_to(d, random_seed=n))
        await cluster.run_prefill(p, request_to(NOBODY))
        counts = {}
        for point in points(reader, "pd.prepare.wait"):
            assert isinstance(point, HistogramDataPoint) and point.attributes is not None
            counts[point.attributes["pd.outcome"]] = point.count
            assert 0 <= point.sum < 60
        assert counts == {"ok": 3, "DECODE_LOST": 1}


async def test_a_breaker_that_opens_is_seen_by_both() -> None:
    async with running() as cluster:
        p, reader = await measured(cluster, breaker_open_s=30.0, breaker_max_s=30.0)
        await cluster.run_prefill(p, request_to(NOBODY))
        assert by_decode(reader, "pd.prepare.breaker_open") == {NOBODY: 1}
        info = p.view.server_info()
        (lane,) = info.prepare
        assert (lane.decode, lane.breaker) == (NOBODY, admin_pb2.BREAKER_STATE_OPEN)
        assert 0 < lane.breaker_left.ToTimedelta().total_seconds() <= 30
        assert "cannot be reached" in lane.breaker_fault.message
        assert info.settings["breaker_open_s"] == "30.0"
