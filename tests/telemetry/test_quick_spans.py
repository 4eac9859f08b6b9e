"""A quick span tells what the SDK's own would have told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    NoOpTracer,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from pd_grpc.protocol.clock import ManualClock
from pd_grpc.telemetry.quick_spans import QuickProvider, QuickSpan, QuickTracer
from pd_grpc.telemetry.tracing import Tracing

PLAIN = st.one_of(st.text(max_size=20), st.booleans(), st.integers(-9, 9), st.binary(max_size=9))
VALUES = st.one_of(PLAIN, st.floats(allow_nan=False), st.lists(PLAIN, max_size=3))
ATTRIBUTES = st.dictionaries(st.text(min_size=1, max_size=5), VALUES, max_size=6)
PARENT = SpanContext(7, 8, True, TraceFlags(TraceFlags.SAMPLED), TraceState([("vendor", "x")]))
ACTS = st.one_of(
    st.tuples(st.just("set_attribute"), st.text(min_size=1, max_size=5), VALUES),
    st.tuples(st.just("set_attributes"), ATTRIBUTES),
    st.tuples(st.just("add_event"), st.text(max_size=9), ATTRIBUTES, st.integers(1, 99)),
    st.tuples(st.just("add_link"), st.just(SpanContext(1, 2, False)), ATTRIBUTES),
    st.tuples(st.just("update_name"), st.text(max_size=9)),
    st.tuples(
        st.just("set_status"),
        st.sampled_from(
            [Status(StatusCode.OK), Status(StatusCode.UNSET), Status(StatusCode.ERROR, "why")]
        ),
    ),
    st.tuples(st.just("end"), st.integers(100, 200)),
)


def recording(provider: TracerProvider) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def told(span: ReadableSpan) -> Any:
    """All that a collector hears of a span, but for the id that is its own and the order of its
    attributes, which means nothing."""
    (resource,) = encode_spans([span]).resource_spans
    message = resource.scope_spans[0].spans[0]
    message.span_id = b""
    message.attributes.sort(key=lambda each: each.key)
    return resource


def one_span(provider: TracerProvider, act: Callable[[Any], None]) -> ReadableSpan:
    exporter = recording(provider)
    tracer = provider.get_tracer("pd_grpc", "1", "https://example.org/1", {"pd.instance": "p0"})
    context = set_span_in_context(NonRecordingSpan(PARENT))
    links = [Link(SpanContext(3, 4, True))]
    span = tracer.start_span("a span", context, SpanKind.SERVER, {"a": 1}, links, 50)
    act(span)
    span.end(300)
    (ended,) = exporter.get_finished_spans()
    return ended


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTS, max_size=12))
def test_whatever_is_done_to_it_it_tells_what_the_sdks_tells(acts: list[tuple[Any, ...]]) -> None:
    def perform(span: Any) -> None:
        for name, *arguments in acts:
            getattr(span, name)(*arguments)

    resource = Resource({"service.name": "pd-grpc"})
    quick = one_span(QuickProvider(resource), perform)
    assert isinstance(quick, QuickSpan)
    assert told(quick) == told(one_span(TracerProvider(resource=resource), perform))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "2"),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "1"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3"),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "0"),
        ("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "0"),
    ],
)
def test_the_sdks_limits_hold(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)

    def fill(span: Any) -> None:
        for number in range(4):
            span.add_event(f"event {number}", {"text": "a long text"}, 60 + number)
            span.add_link(SpanContext(number + 10, 9, False))
        span.set_attribute("text", ["a long text", "another"])

    assert told(one_span(QuickProvider(Resource({})), fill)) == told(
        one_span(TracerProvider(resource=Resource({})), fill)
    )


def test_beyond_as_many_attributes_as_the_limit_the_newest_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2")
    span = one_span(QuickProvider(), lambda span: span.set_attributes({"b": 2, "c": 3, "a": 4}))
    assert dict(span.attributes or {}) == {"a": 4, "b": 2}
    assert span.dropped_attributes == 1


def test_a_trace_that_begins_here_has_ids_and_flags_like_the_sdks() -> None:
    quick = QuickProvider().get_tracer("pd_grpc").start_span("root").get_span_context()
    sdks = TracerProvider().get_tracer("pd_grpc").start_span("root").get_span_context()
    assert quick.is_valid and quick.trace_flags == sdks.trace_flags
    assert not quick.is_remote


def test_sdk_switched_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert isinstance(QuickProvider().get_tracer("pd_grpc"), NoOpTracer)


@pytest.mark.parametrize(("sampler", "recorded"), [("always_off", 0), ("always_on", 1)])
def test_the_environment_chooses_the_sampler(
    monkeypatch: pytest.MonkeyPatch, sampler: str, recorded: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    provider = QuickProvider()
    exporter = recording(provider)
    tracing = Tracing(ManualClock(), "p0", "prefill", provider)
    span = tracing.start("pd.request")
    tracing.end(tracing.start("pd.route", parent=Tracing.context(span)))
    tracing.end(span)
    assert len(exporter.get_finished_spans()) == 2 * recorded
    assert span.get_span_context().is_valid


def test_a_processor_hears_of_the_beginning_and_may_add_to_it() -> None:
    class Marks(SpanProcessor):
        def on_start(self, span: Span, parent_context: Any = None) -> None:
            span.set_attribute("marked", span.name)

    provider = QuickProvider()
    provider.add_span_processor(Marks())
    assert (one_span(provider, lambda span: None).attributes or {})["marked"] == "a span"


def test_an_exception_is_an_event_with_its_type_and_message() -> None:
    def fail(span: Any) -> None:
        try:
            raise KeyError("absent")
        except KeyError as error:
            span.record_exception(error, timestamp=60)

    (event,) = one_span(QuickProvider(), fail).events
    assert event.name == "exception"
    about = dict(event.attributes or {})
    assert about["exception.type"] == "KeyError"
    assert "absent" in str(about["exception.message"])
    assert "Traceback" in str(about["exception.stacktrace"])


def test_what_the_sdks_spans_have_more_than_ours_makes_them_the_sdks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ReadableSpan.__init__

    def newer(self: ReadableSpan, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self._new = 1  # type: ignore[attr-defined]

    assert isinstance(QuickProvider().get_tracer("pd_grpc"), QuickTracer)
    monkeypatch.setattr(ReadableSpan, "__init__", newer)
    assert isinstance(QuickProvider().get_tracer("pd_grpc"), Tracer)
