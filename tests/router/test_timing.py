"""Where routing ends and P's queue begins, on one clock; and that span, metric and answer agree."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.protocol.messages import duration, seconds
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.router.timing import AnswerTimes
from pd_grpc.telemetry import names
from pd_grpc.v1 import types_pb2
from tests.cluster import cluster
from tests.system.asking import ask, request
from tests.system.test_metrics import Read


def test_the_way_to_p_is_half_of_the_time_to_its_first_word() -> None:
    times = AnswerTimes(accepted=10.0, opened=10.002)
    times.routed = times.answered(10.008)
    assert times.routed == pytest.approx(10.005)


def test_the_stages_of_an_answer_sum_to_its_first_token_from_where_routing_ends() -> None:
    times = AnswerTimes(accepted=10.0, opened=10.002)
    times.routed = times.answered(10.008)
    times.prefill = types_pb2.Timings(
        queue=duration(0.02), prepare=duration(0.01), compute=duration(0.05)
    )
    times.came(1, 10.1)
    told = times.timings(11.0)
    assert seconds(told.route) == pytest.approx(0.005)
    assert seconds(told.first_token) == pytest.approx(0.1 - 0.005 - 0.08)


def test_of_a_p_that_never_says_a_word_routing_ends_where_the_legs_are_open() -> None:
    times = AnswerTimes(accepted=10.0, opened=10.002)
    times.came(1, 10.1)
    told = times.timings(11.0)
    assert seconds(told.route) == pytest.approx(0.002)
    assert seconds(told.first_token) == pytest.approx(0.098)


@pytest.mark.parametrize("aggregated", [False, True])
async def test_span_metric_and_answer_tell_the_same_route(aggregated: bool) -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with (
        cluster(
            provider=provider, meters=MeterProvider([reader]), aggregated=aggregated
        ) as running,
        running.client() as stub,
    ):
        sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
        reply = await ask(stub, request(list(range(3, 60)), sampling))
        await running.settled()
    (route,) = [s for s in exporter.get_finished_spans() if s.name == names.SPAN_ROUTE]
    assert route.start_time is not None and route.end_time is not None
    route_s = seconds(reply.last.timings.route)
    assert route_s > 0
    assert (route.end_time - route.start_time) / 1e9 == pytest.approx(route_s, abs=1e-6)
    (point,) = Read(reader).points(names.METRIC_STAGE_DURATION, stage="route")
    assert (point.count, point.sum) == (1, pytest.approx(route_s, abs=1e-6))
