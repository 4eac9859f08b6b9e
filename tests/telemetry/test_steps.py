"""The span of an engine's step: whom it names, and when there is none."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.clock import ManualClock
from pd_grpc.telemetry import names
from pd_grpc.telemetry.steps import StepSpans
from pd_grpc.telemetry.tracing import Tracing, extract
from tests.telemetry.recorder import Recorder

LEFT_OUT = [("traceparent", f"00-{'a' * 32}-{'b' * 16}-00")]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_a_step_names_what_each_of_its_requests_is_about(
    recorder: Recorder, clock: ManualClock
) -> None:
    tracing = Tracing(clock, "d0", "decode", recorder.provider)
    steps = StepSpans(tracing)
    decode, compute = tracing.start(names.SPAN_DECODE), tracing.start(names.SPAN_COMPUTE)
    steps.began([decode, None, compute], batch=3, tokens=18, at=clock.now())
    steps.ended(clock.now(), ("INTERNAL", "ENGINE_ERROR"))
    step = recorder.span(names.SPAN_STEP)
    assert [link.context for link in step.links] == [
        each.get_span_context() for each in (decode, compute)
    ]
    about = dict(step.attributes or {})
    assert (about[names.ATTR_BATCH], about[names.ATTR_TOKENS]) == (3, 18)
    assert (step.parent, about[names.ATTR_OUTCOME]) == (None, "ENGINE_ERROR")


def test_a_step_that_serves_nobody_who_is_recorded_has_no_span(
    recorder: Recorder, clock: ManualClock
) -> None:
    tracing = Tracing(clock, "p0", "prefill", recorder.provider)
    steps = StepSpans(tracing)
    left_out = tracing.start(names.SPAN_COMPUTE, parent=extract(LEFT_OUT))
    gone = tracing.start(names.SPAN_COMPUTE)
    tracing.end(gone)
    for serves in ([left_out], [], [None], [gone]):
        steps.began(serves, batch=1, tokens=4, at=clock.now())
        steps.ended(clock.now(), None)
    assert [span.name for span in recorder.spans] == [names.SPAN_COMPUTE]


def test_a_step_without_a_span_does_not_end_the_one_before_again(
    recorder: Recorder, clock: ManualClock
) -> None:
    tracing = Tracing(clock, "p0", "prefill", recorder.provider)
    steps = StepSpans(tracing)
    for serves in ([tracing.start(names.SPAN_COMPUTE)], []):
        steps.began(serves, batch=1, tokens=4, at=clock.now())
        steps.ended(clock.now(), None)
    assert [span.name for span in recorder.spans] == [names.SPAN_STEP]
