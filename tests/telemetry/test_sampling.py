"""What is not sampled is not recorded, and the sampler that was chosen is the one that decides."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    ParentBasedTraceIdRatio,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import SpanContext, TraceFlags

from pd_grpc.protocol.clock import ManualClock
from pd_grpc.telemetry import names
from pd_grpc.telemetry.quick_spans import QuickProvider
from pd_grpc.telemetry.tracing import MOST_CHARS, Tracing, extract, trace_id

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = [("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01")]
LEFT_OUT = [("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-00")]


class Recorded:
    """A tracing whose ended spans stay in `spans`."""

    def __init__(self, sampler: Sampler, keep: int = 0) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(ManualClock(), "p0", "prefill", provider, keep)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.mark.parametrize("sampler", [ParentBased(ALWAYS_ON), ParentBasedTraceIdRatio(1.0)])
def test_a_request_whose_caller_left_it_out_has_no_span_at_all(sampler: Sampler) -> None:
    recorded = Recorded(sampler)
    root = recorded.tracing.start("pd.request", parent=extract(LEFT_OUT))
    child = recorded.tracing.start("pd.route", parent=Tracing.context(root))
    for span in (child, root):
        assert not span.is_recording()
        recorded.tracing.end(span)
    assert recorded.spans == []
    # Logs still name it, and whoever is called further on leaves it out too.
    assert trace_id(Tracing.context(child)) == TRACE_ID
    assert not child.get_span_context().trace_flags.sampled


@pytest.mark.parametrize(
    "sampler", [ALWAYS_ON, TraceIdRatioBased(1.0), ParentBased(ALWAYS_ON, ALWAYS_ON, ALWAYS_ON)]
)
def test_a_sampler_that_does_not_follow_the_caller_is_asked(sampler: Sampler) -> None:
    recorded = Recorded(sampler)
    recorded.tracing.end(recorded.tracing.start("pd.request", parent=extract(LEFT_OUT)))
    assert [span.name for span in recorded.spans] == ["pd.request"]


def test_a_request_that_the_sampler_leaves_out_is_left_out_to_its_last_span() -> None:
    recorded = Recorded(ParentBased(ALWAYS_OFF))
    root = recorded.tracing.start("pd.request")
    child = recorded.tracing.start("pd.route", parent=Tracing.context(root))
    assert not root.is_recording() and not child.is_recording()
    assert root.get_span_context().trace_id == child.get_span_context().trace_id != 0


def link(sampled: bool) -> SpanContext:
    return SpanContext(1, 2, False, TraceFlags(TraceFlags.SAMPLED if sampled else 0))


def test_a_step_names_only_requests_that_are_sampled() -> None:
    recorded = Recorded(ALWAYS_ON)
    links = [link(False), link(True), link(False)]
    recorded.tracing.end(recorded.tracing.start(names.SPAN_STEP, links=links))
    (step,) = recorded.spans
    assert [each.context for each in step.links] == [link(True)]


def test_a_step_that_serves_no_sampled_request_is_not_recorded() -> None:
    recorded = Recorded(ALWAYS_ON)
    step = recorded.tracing.start(names.SPAN_STEP, links=[link(False)] * 3)
    assert not step.is_recording()
    recorded.tracing.end(step)
    assert recorded.spans == []


def test_a_step_is_recorded_only_where_it_goes_somewhere() -> None:
    kept_alone = Tracing(ManualClock(), "d0", "decode", None, 3)
    assert not kept_alone.start(names.SPAN_STEP).is_recording()
    both = Recorded(ALWAYS_ON, keep=3)
    both.tracing.end(both.tracing.start(names.SPAN_STEP))
    assert [span.name for span in both.spans] == [names.SPAN_STEP]


def test_what_is_exported_is_kept_as_well() -> None:
    recorded = Recorded(ALWAYS_ON, keep=3)
    span = recorded.tracing.start("pd.request", attributes={names.ATTR_REQUEST_ID: "r-1"})
    recorded.tracing.end(span, error=("UNAVAILABLE", "PEER_LOST"))
    (exported,), (kept,) = recorded.spans, recorded.tracing.recent.find("r-1")
    assert kept.context == exported.context
    assert kept.attributes == exported.attributes
    assert kept.status.description == exported.status.description == "PEER_LOST"


class RecordOnly(Sampler):
    """Records every span and samples none."""

    def should_sample(self, *args: object, **kwargs: object) -> SamplingResult:
        return SamplingResult(Decision.RECORD_ONLY)

    def get_description(self) -> str:
        return "RecordOnly"


def test_a_span_of_the_application_that_is_not_sampled_is_left_alone() -> None:
    application = TracerProvider(sampler=RecordOnly()).get_tracer("application")
    above = application.start_span("theirs")
    context = trace.set_span_in_context(above)
    recorded = Recorded(ParentBased(ALWAYS_ON))
    recorded.tracing.end(recorded.tracing.start("pd.request", parent=context))
    assert above.is_recording() and not recorded.spans


class Raising(SpanProcessor):
    """Raises what an embedder's code may."""

    def on_end(self, span: ReadableSpan) -> None:
        raise LookupError("theirs")


@pytest.mark.parametrize("provider", [QuickProvider, TracerProvider])
def test_what_a_processor_raises_is_not_the_fault_of_a_request(
    provider: type[TracerProvider], caplog: pytest.LogCaptureFixture
) -> None:
    made = provider()
    made.add_span_processor(Raising())
    tracing = Tracing(ManualClock(), "p0", "prefill", made)
    for _ in range(3):
        tracing.end(tracing.start("pd.request"))
    assert len(caplog.records) <= 1


def test_a_name_of_any_length_is_cut() -> None:
    recorded = Recorded(ALWAYS_ON)
    long: dict[str, str | int] = {
        names.ATTR_REQUEST_ID: "x" * 4_000_000,
        names.ATTR_PROMPT_TOKENS: 3,
    }
    recorded.tracing.end(recorded.tracing.start("pd.request", attributes=long))
    (span,) = recorded.spans
    assert span.attributes is not None
    assert span.attributes[names.ATTR_REQUEST_ID] == "x" * MOST_CHARS
    assert span.attributes[names.ATTR_PROMPT_TOKENS] == 3
