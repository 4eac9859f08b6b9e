"""Spans are written as OpenTelemetry's own encoder writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from pd_grpc.telemetry.span_encoding import MOST_CACHED, FastSpanExporter, SpanEncoder

PLAIN = st.one_of(
    st.text(max_size=200),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False),
    st.binary(max_size=200),
)
ANY = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.integers(), st.none())
KEYS = st.text(min_size=1, max_size=150)
ATTRIBUTES = st.dictionaries(KEYS, PLAIN, max_size=6)
IDS = st.tuples(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans())


def context(ids: tuple[int, int, bool], state: dict[str, str] | None = None) -> SpanContext:
    trace_id, span_id, remote = ids
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace_id, span_id, remote, sampled, TraceState(list((state or {}).items())))


class Recorder:
    """A provider whose spans stay here."""

    def __init__(self, limits: SpanLimits | None = None, **resource: str) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(
            resource=Resource(resource), span_limits=limits, shutdown_on_exit=False
        )
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("pd_grpc", "1")
        self.other = provider.get_tracer("somebody.else", schema_url="https://example.org/1")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


def flattened(request: ExportTraceServiceRequest) -> list[tuple[Any, ...]]:
    """Each span with its resource and its scope; how they are grouped says nothing."""
    return sorted(
        (
            span.SerializeToString(deterministic=True),
            scope.scope.SerializeToString(deterministic=True),
            scope.schema_url,
            resource.resource.SerializeToString(deterministic=True),
            resource.schema_url,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    )


def check(spans: list[ReadableSpan], encoder: SpanEncoder | None = None) -> None:
    encoded = (encoder or SpanEncoder()).encode(spans)
    ours = ExportTraceServiceRequest.FromString(encoded)
    assert flattened(ours) == flattened(encode_spans(spans))


@settings(max_examples=200, deadline=None)
@given(
    name=st.text(max_size=200),
    attributes=st.dictionaries(KEYS, ANY, max_size=6),
    events=st.lists(st.tuples(st.text(max_size=150), ATTRIBUTES), max_size=4),
    links=st.lists(st.tuples(IDS, ATTRIBUTES), max_size=4),
    parent=st.none() | IDS,
    kind=st.sampled_from(SpanKind),
    failure=st.none() | st.text(max_size=200),
    times=st.tuples(st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 63) - 1)),
)
def test_whatever_a_span_holds_is_written_as_opentelemetry_does(
    name: str,
    attributes: dict[str, Any],
    events: list[tuple[str, dict[str, Any]]],
    links: list[tuple[tuple[int, int, bool], dict[str, Any]]],
    parent: tuple[int, int, bool] | None,
    kind: SpanKind,
    failure: str | None,
    times: tuple[int, int],
) -> None:
    recorder = Recorder()
    above = None if parent is None else set_span_in_context(NonRecordingSpan(context(parent)))
    span = recorder.tracer.start_span(
        name,
        above,
        kind,
        attributes,
        [Link(context(ids), about) for ids, about in links],
        start_time=times[0],
    )
    for event, about in events:
        span.add_event(event, about, times[1])
    if failure is not None:
        span.set_status(Status(StatusCode.ERROR, failure))
    span.end(times[1])
    check(recorder.spans)


def test_spans_of_several_resources_and_scopes_keep_theirs() -> None:
    first, second = Recorder(role="a"), Recorder(role="b")
    for recorder in (first, second):
        for tracer in (recorder.tracer, recorder.other):
            for name in ("one", "two"):
                tracer.start_span(name).end()
    mixed = [span for pair in zip(first.spans, second.spans, strict=True) for span in pair]
    encoder = SpanEncoder()
    check(mixed, encoder)
    check(mixed[::-1], encoder)


def test_the_callers_trace_state_is_passed_on() -> None:
    recorder = Recorder()
    above = NonRecordingSpan(context((1, 2, True), {"vendor": "x", "other": "y"}))
    recorder.tracer.start_span("child", set_span_in_context(above)).end()
    check(recorder.spans)


def test_what_was_dropped_is_counted() -> None:
    limits = SpanLimits(max_attributes=1, max_events=1, max_links=1, max_event_attributes=1)
    recorder = Recorder(limits)
    links = [Link(context((n, n, False))) for n in (1, 2, 3)]
    span = recorder.tracer.start_span("busy", attributes={"a": 1, "b": 2, "c": 3}, links=links)
    for _ in range(3):
        span.add_event("again", {"x": 1, "y": 2})
    span.end()
    (ended,) = recorder.spans
    assert ended.dropped_attributes and ended.dropped_events and ended.dropped_links
    check(recorder.spans)


@pytest.mark.parametrize("pair", [(1, True), (0, False), (1.0, 1), (0.0, -0.0), ("1", 1)])
def test_values_that_are_equal_but_not_the_same_are_not_mistaken(pair: tuple[Any, Any]) -> None:
    recorder, encoder = Recorder(), SpanEncoder()
    for value in (*pair, *pair):
        recorder.tracer.start_span("equal", attributes={"value": value}).end()
    check(recorder.spans, encoder)


def test_the_same_link_with_and_without_attributes_is_not_mistaken() -> None:
    recorder, encoder = Recorder(), SpanEncoder()
    here, there = context((1, 2, False)), context((1, 2, True))
    for links in ([Link(here)], [Link(there)], [Link(here, {"a": 1})], [Link(here), Link(there)]):
        for _ in range(2):
            recorder.tracer.start_span("step", links=links).end()
    check(recorder.spans, encoder)


def test_what_is_remembered_is_bounded() -> None:
    recorder, encoder = Recorder(), SpanEncoder()
    for number in range(2 * MOST_CACHED + 10):
        links = [Link(context((1, number + 1, False)))]
        recorder.tracer.start_span("one", attributes={"number": number}, links=links).end()
    check(recorder.spans, encoder)
    assert len(encoder._cached) <= MOST_CACHED and len(encoder._links) <= MOST_CACHED


def test_the_exporter_sends_what_is_written_here(monkeypatch: pytest.MonkeyPatch) -> None:
    # The method that it takes the place of is private to OpenTelemetry's exporter.
    sent: list[bytes] = []
    encode = SpanEncoder.encode
    exporter = FastSpanExporter("127.0.0.1:1", 0.1)

    def watched(self: SpanEncoder, spans: Sequence[ReadableSpan]) -> bytes:
        sent.append(encode(self, spans))
        return sent[-1]

    monkeypatch.setattr(SpanEncoder, "encode", watched)
    span = TracerProvider(shutdown_on_exit=False).get_tracer("pd_grpc").start_span("one")
    span.end()
    assert isinstance(span, ReadableSpan)
    exporter.export([span])
    exporter.shutdown()
    assert len(sent) == 1 and sent[0] == encode(SpanEncoder(), [span])
