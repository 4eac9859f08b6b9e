"""A trace holds together across calls and threads, and its times are the clock's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import ManualClock
from pd_grpc.protocol.config import ServerConfig, Sizes, Timeouts
from pd_grpc.telemetry import names
from pd_grpc.telemetry.tracing import Tracing, extract, inject, trace_id
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.telemetry.recorder import Recorder, id_of, parent_of

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_a_span_lasts_as_long_as_the_clock_says(recorder: Recorder, clock: ManualClock) -> None:
    tracing = Tracing(clock, "p0", "prefill", recorder.provider)
    wall = clock.wall_ns()
    span = tracing.start(names.SPAN_COMPUTE)
    clock.advance(0.25)
    tracing.event(span, names.EVENT_CHUNK, attributes={names.ATTR_TOKENS: 512})
    clock.advance(1.25)
    tracing.end(span)
    found = recorder.span("pd.compute")
    assert found.start_time == wall
    assert found.end_time == wall + 1_500_000_000
    (event,) = found.events
    assert (event.name, event.timestamp) == ("pd.chunk", wall + 250_000_000)
    assert dict(event.attributes or {}) == {"pd.tokens": 512}


def test_a_span_may_be_told_of_after_the_fact(recorder: Recorder, clock: ManualClock) -> None:
    tracing = Tracing(clock, "p0", "prefill", recorder.provider)
    wall, began = clock.wall_ns(), clock.now()
    clock.advance(10)
    span = tracing.start(names.SPAN_QUEUE, at=began + 1)
    tracing.event(span, names.EVENT_ACK, at=began + 1.5)
    tracing.end(span, at=began + 2)
    found = recorder.span("pd.queue")
    assert found.start_time == wall + 1_000_000_000
    assert found.events[0].timestamp == wall + 1_500_000_000
    assert found.end_time == wall + 2_000_000_000


def test_setting_the_wall_clock_does_not_bend_a_span(recorder: Recorder) -> None:
    class Jumping(ManualClock):
        jump_ns = 0

        def wall_ns(self) -> int:
            return super().wall_ns() + self.jump_ns

    clock = Jumping()
    tracing = Tracing(clock, "p0", "prefill", recorder.provider)
    span = tracing.start(names.SPAN_SEND)
    clock.jump_ns = -3_600_000_000_000
    clock.advance(1)
    tracing.end(span)
    found = recorder.span("pd.send")
    assert found.start_time is not None and found.end_time is not None
    assert found.end_time - found.start_time == 1_000_000_000


def test_a_span_says_whose_it_is_and_how_it_ended(recorder: Recorder, clock: ManualClock) -> None:
    tracing = Tracing(clock, "d0", "decode", recorder.provider)
    work: dict[str, str | int] = {names.ATTR_TRANSFER_ID: "t-1", names.ATTR_ATTEMPT: 2}
    tracing.end(tracing.start(names.SPAN_RESERVE, attributes=work))
    found = recorder.span("pd.reserve")
    assert dict(found.attributes or {}) == {
        "pd.transfer_id": "t-1",
        "pd.attempt": 2,
        "pd.instance": "d0",
        "pd.role": "decode",
        "pd.outcome": "ok",
    }
    assert found.status.status_code is StatusCode.UNSET


def test_a_span_that_fails_says_the_reason(recorder: Recorder, clock: ManualClock) -> None:
    tracing = Tracing(clock, "d0", "decode", recorder.provider)
    span = tracing.start(names.SPAN_RESERVE)
    tracing.end(span, error=("RESOURCE_EXHAUSTED", "NO_BLOCKS"))
    found = recorder.span("pd.reserve")
    assert found.status.status_code is StatusCode.ERROR
    assert found.status.description == "NO_BLOCKS"
    attributes = dict(found.attributes or {})
    assert attributes["pd.outcome"] == attributes["error.type"] == "NO_BLOCKS"
    assert attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"


def test_a_step_is_linked_to_the_requests_it_served(recorder: Recorder, clock: ManualClock) -> None:
    tracing = Tracing(clock, "d0", "decode", recorder.provider)
    requests = [tracing.start(names.SPAN_DECODE) for _ in range(2)]
    step = tracing.start(names.SPAN_STEP, links=[r.get_span_context() for r in requests])
    tracing.end(step)
    linked = [link.context.span_id for link in recorder.span("pd.step").links]
    assert linked == [r.get_span_context().span_id for r in requests]


def test_a_span_without_a_parent_starts_a_trace_whatever_is_current(
    recorder: Recorder, clock: ManualClock
) -> None:
    tracing = Tracing(clock, "r", "router", recorder.provider)
    other = tracing.start("other")
    with trace.use_span(other):
        tracing.end(tracing.start(names.SPAN_REQUEST))
    assert recorder.span("pd.request").parent is None


class Relay(admin_pb2_grpc.AdminServiceServicer):
    """Records one span per call, as a child of the caller's."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def Drain(self, request: Any, context: Any) -> admin_pb2.DrainResponse:
        parent = extract(context.invocation_metadata())
        self._tracing.end(self._tracing.start(names.SPAN_PREFILL_REQUEST, parent=parent))
        return admin_pb2.DrainResponse()


@pytest.fixture
async def endpoint(recorder: Recorder, clock: ManualClock) -> AsyncIterator[str]:
    server = grpc.aio.server(options=rpc.server_options(ServerConfig()))
    relay = Relay(Tracing(clock, "p0", "prefill", recorder.provider))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(relay, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_the_parent_survives_a_call(
    endpoint: str, recorder: Recorder, clock: ManualClock
) -> None:
    tracing = Tracing(clock, "r", "router", recorder.provider)
    span = tracing.start(names.SPAN_REQUEST)
    metadata = inject(tracing.context(span), [("x-other", "kept")])
    async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        await stub.Drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=60)
    tracing.end(span)
    caller, served = recorder.span("pd.request"), recorder.span("pd.prefill_request")
    assert parent_of(served) == id_of(caller)
    assert ("x-other", "kept") in metadata


async def test_the_trace_passes_through_an_instance_that_records_nothing(
    endpoint: str, recorder: Recorder, clock: ManualClock
) -> None:
    client = Tracing(clock, "c", "client", recorder.provider)
    router = Tracing(clock, "r", "router")
    span = client.start("client")
    inner = router.start(names.SPAN_REQUEST, parent=extract(inject(client.context(span))))
    async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        metadata = inject(router.context(inner))
        await stub.Drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=60)
    router.end(inner, error=("INTERNAL", "ENGINE_ERROR"))
    client.end(span)
    assert parent_of(recorder.span("pd.prefill_request")) == id_of(recorder.span("client"))


def test_the_parent_survives_a_thread(recorder: Recorder, clock: ManualClock) -> None:
    tracing = Tracing(clock, "p0", "prefill", recorder.provider)
    request = tracing.start(names.SPAN_PREFILL_REQUEST)
    parent = tracing.context(request)
    with ThreadPoolExecutor(1) as engine:
        span = engine.submit(tracing.start, names.SPAN_COMPUTE, parent=parent).result()
        engine.submit(tracing.end, span).result()
    tracing.end(request)
    assert parent_of(recorder.span("pd.compute")) == id_of(recorder.span("pd.prefill_request"))


def test_without_a_provider_a_request_still_has_one_trace_id(clock: ManualClock) -> None:
    router, prefill = Tracing(clock, "r", "router"), Tracing(clock, "p0", "prefill")
    first, second = router.start(names.SPAN_REQUEST), router.start(names.SPAN_REQUEST)
    here = trace_id(router.context(first))
    there = prefill.start("pd.queue", parent=extract(inject(router.context(first))))
    assert len(here) == 32
    assert trace_id(prefill.context(there)) == here
    assert trace_id(router.context(second)) != here


def test_a_sampled_out_request_keeps_its_trace_id_and_records_nothing(clock: ManualClock) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(clock, "r", "router", provider)
    span = tracing.start(names.SPAN_REQUEST, attributes={names.ATTR_TRANSFER_ID: "t"})
    child = tracing.start(names.SPAN_ROUTE, parent=tracing.context(span))
    for ended in (child, span):
        tracing.event(ended, names.EVENT_ACK)
        tracing.end(ended)
    assert trace_id(tracing.context(child)) == trace_id(tracing.context(span)) != ""
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("traceparent", "nonsense")],
        [("traceparent", TRACEPARENT.encode())],
        [("traceparent", "00-" + "0" * 32 + "-b7ad6b7169203331-01")],
        [("user-agent", "x"), ("some-bin", b"\x00\xff")],
    ],
)
def test_a_trace_context_that_cannot_be_read_is_none(metadata: Any) -> None:
    assert trace_id(extract(metadata)) == ""


def test_a_trace_state_in_several_entries_is_kept_whole() -> None:
    context = extract([("TraceParent", TRACEPARENT), ("tracestate", "a=1"), ("tracestate", "b=2")])
    assert dict(inject(context)) == {"traceparent": TRACEPARENT, "tracestate": "a=1,b=2"}


def test_the_context_of_a_call_replaces_the_one_it_carried() -> None:
    context = extract([("traceparent", TRACEPARENT)])
    stale = [("traceparent", TRACEPARENT.replace("-01", "-00")), ("tracestate", "old=1")]
    assert inject(context, stale) == [("traceparent", TRACEPARENT)]
    assert inject(None, [("x", "y")]) == [("x", "y")]
