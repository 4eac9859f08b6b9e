"""The last traces of an instance stay in memory, bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider

from pd_grpc.protocol.clock import ManualClock
from pd_grpc.telemetry import names
from pd_grpc.telemetry.recent import MOST_SPANS, SPANS_A_TRACE, RecentTraces
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


def test_of_one_trace_the_newest_spans_are_kept() -> None:
    """One caller may send all its requests in one."""
    kept = tracing()
    context = extract([("traceparent", TRACEPARENT)])
    for n in range(MOST_SPANS + 10):
        kept.end(kept.start("pd.request", parent=context, attributes={"pd.request_id": f"r-{n}"}))
    found = kept.recent.find(TRACEPARENT.split("-")[1])
    assert len(found) == MOST_SPANS
    assert (found[0].attributes or {})["pd.request_id"] == "r-10"
    assert kept.recent.find(f"r-{MOST_SPANS + 9}") == found and not kept.recent.find("r-9")


def test_all_traces_together_keep_no_more_than_so_many_spans() -> None:
    kept = tracing(keep=8)
    for n in range(16):
        span = kept.start("pd.request", attributes={names.ATTR_REQUEST_ID: f"r-{n}"})
        for _ in range(200):
            kept.end(kept.start("pd.send", parent=Tracing.context(span)))
        kept.end(span)
    held = [len(kept.recent.find(f"r-{n}")) for n in range(16)]
    # Two and a half of them are what eight traces of the usual size have.
    assert held == [0] * 14 + [201] * 2 and sum(held) <= 8 * SPANS_A_TRACE


def test_a_span_keeps_no_more_than_so_many_moments() -> None:
    """A prompt of a million tokens is acknowledged in as many pieces as its receiver likes."""
    kept = tracing()
    span = kept.start("pd.send", attributes={names.ATTR_TRANSFER_ID: "t-1"})
    for n in range(100_000):
        kept.event(span, names.EVENT_ACK, attributes={names.ATTR_BLOCK_START: n})
    kept.end(span)
    (found,) = kept.recent.find("t-1")
    assert len(found.events) == SpanLimits().max_events
    assert (found.events[-1].attributes or {})[names.ATTR_BLOCK_START] == 99_999


def test_many_threads_may_keep_and_find_at_once() -> None:
    kept = tracing(keep=4)
    context = extract([("traceparent", TRACEPARENT)])

    def work(n: int) -> int:
        for i in range(200):
            kept.end(kept.start("pd.a", parent=context if i % 2 else None))
            kept.recent.find(f"r-{n}")
        return len(kept.recent.find(TRACEPARENT.split("-")[1]))

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) <= MOST_SPANS


def test_an_id_in_hex_that_is_no_traces_may_be_a_requests() -> None:
    kept = tracing()
    record(kept, request_id="ab" * 16)
    assert names_of(kept.recent.find("ab" * 16)) == ["pd.route"]
    for odd in ("", "0" * 32, "+" + "a" * 31, "_" * 32, "zz" * 16):
        assert kept.recent.find(odd) == []


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
