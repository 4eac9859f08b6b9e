"""The last traces of an instance stay in memory, bounded."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from pd_grpc.protocol.clock import ManualClock
from pd_grpc.telemetry import names
from pd_grpc.telemetry.recent import MOST_SPANS, RecentTraces
from pd_grpc.telemetry.tracing import Tracing, extract, trace_id

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def tracing(keep: int = 3, instance: str = "d0", provider: TracerProvider | None = None) -> Tracing:
    return Tracing(ManualClock(), instance, "decode", provider, keep)


def record(of: Tracing, name: str = "pd.route", request_id: str = "r-1") -> str:
    """A trace of one span; its id."""
    span = of.start(name, attributes={names.ATTR_REQUEST_ID: request_id})
    of.end(span)
    return trace_id(Tracing.context(span))


def names_of(spans: list[ReadableSpan]) -> list[str]:
    return [span.name for span in spans]


def test_a_trace_is_found_by_its_id_and_by_those_of_request_and_transfer() -> None:
    kept = tracing()
    span = kept.start(
        "pd.request",
        attributes={names.ATTR_REQUEST_ID: "r-9", names.ATTR_TRANSFER_ID: "t-9"},
    )
    kept.end(kept.start("pd.route", parent=Tracing.context(span)))
    kept.end(span)
    for wanted in (trace_id(Tracing.context(span)), "r-9", "t-9"):
        assert names_of(kept.recent.find(wanted)) == ["pd.route", "pd.request"]
    assert kept.recent.find("r-8") == []


def test_of_several_traces_of_a_request_the_newest_is_meant() -> None:
    kept = tracing()
    record(kept)
    newest = record(kept, "pd.decode")
    (found,) = kept.recent.find("r-1")
    assert found.context is not None
    assert f"{found.context.trace_id:032x}" == newest


def test_the_oldest_makes_room() -> None:
    kept = tracing(keep=3)
    ids = [record(kept, request_id=f"r-{n}") for n in range(5)]
    assert [bool(kept.recent.find(each)) for each in ids] == [False, False, True, True, True]


def test_one_trace_keeps_no_more_than_so_many_spans() -> None:
    kept = tracing()
    context = extract([("traceparent", TRACEPARENT)])
    for _ in range(MOST_SPANS + 10):
        kept.end(kept.start("pd.request", parent=context))
    assert len(kept.recent.find(TRACEPARENT.split("-")[1])) == MOST_SPANS


def test_a_step_belongs_to_nobody_and_is_not_kept() -> None:
    kept = tracing()
    record(kept, names.SPAN_STEP)
    assert kept.recent.find("r-1") == []


def test_of_a_provider_that_others_use_only_ones_own_spans_are_kept() -> None:
    provider = TracerProvider()
    mine, others = tracing(provider=provider), tracing(instance="d1", provider=provider)
    record(mine, request_id="mine")
    record(others, request_id="others")
    assert mine.recent.find("mine") and not mine.recent.find("others")
    assert others.recent.find("others") and not others.recent.find("mine")


def test_what_the_caller_did_not_sample_is_not_kept() -> None:
    kept = tracing()
    context = extract([("traceparent", TRACEPARENT[:-1] + "0")])
    kept.end(kept.start("pd.request", parent=context))
    assert kept.recent.find(TRACEPARENT.split("-")[1]) == []


def test_nothing_to_keep_records_nothing() -> None:
    span = tracing(keep=0).start("pd.request")
    assert not span.is_recording()


def test_it_can_be_asked_for_nothing() -> None:
    assert RecentTraces(3).find("x") == []
