"""A collector that is away, silent, slow or full: one line, a bounded queue and a bounded stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import grpc
import pytest
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
    OTEL_METRIC_EXPORT_INTERVAL,
)

from pd_grpc.protocol.clock import SystemClock
from pd_grpc.telemetry import names
from pd_grpc.telemetry.exporting import STOP_S, Telemetry, make_telemetry
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.otlp import ATTEMPT_S
from pd_grpc.telemetry.tracing import Tracing
from tests.telemetry.collector import Collector, deaf_port, mute_port

pytestmark = pytest.mark.longest

QUEUE, BATCH = 64, 16
SCHEDULING_S = 20.0
"""What a slow and busy machine may add to a time."""
MANY = 20 * QUEUE
"""Spans: if each batch of them were waited for, that would be minutes."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Batches every few milliseconds, and few spans to a queue."""
    monkeypatch.setenv(OTEL_BSP_SCHEDULE_DELAY, "20")
    monkeypatch.setenv(OTEL_METRIC_EXPORT_INTERVAL, "50")
    monkeypatch.setenv(OTEL_BSP_MAX_QUEUE_SIZE, str(QUEUE))
    monkeypatch.setenv(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, str(BATCH))
    caplog.set_level(logging.INFO)


class Working:
    """An instance that makes spans and counts."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._tracing = Tracing(SystemClock(), "d0", "decode", telemetry.tracers)
        instruments = Instruments("d0", telemetry.meters)
        self._refusals = instruments.counter(names.METRIC_REFUSALS)

    def do(self, spans: int = 1) -> None:
        for _ in range(spans):
            self._tracing.end(self._tracing.start(names.SPAN_DECODE))
            self._refusals.add(1, {"reason": "NO_BLOCKS"})

    def do_without_waiting(self, spans: int) -> None:
        began = time.monotonic()
        self.do(spans)
        assert time.monotonic() - began < SCHEDULING_S < spans / BATCH * ATTEMPT_S / 2


@contextmanager
def working(endpoint: str) -> Iterator[Working]:
    """One that exports there; its stop must keep to its bound."""
    telemetry = make_telemetry("pd-grpc-decode", "d0", endpoint, "")
    try:
        yield Working(telemetry)
    finally:
        began = time.monotonic()
        telemetry.shutdown()
        assert time.monotonic() - began < STOP_S + SCHEDULING_S
        left = [t.name for t in threading.enumerate() if t.name.startswith(("Otel", "pd-tele"))]
        assert left == []


def lines(caplog: pytest.LogCaptureFixture, signal: str) -> list[str]:
    """What was said of a signal, and by nobody else."""
    others = [r for r in caplog.records if r.name.startswith("opentelemetry")]
    assert others == [], [r.getMessage() for r in others]
    ours = [r for r in caplog.records if r.name == "pd_grpc.telemetry.exporting"]
    assert all(vars(r)["instance"] == "d0" and vars(r)["peer"] for r in ours)
    return [r.getMessage() for r in ours if signal in r.getMessage().split(":")[0]]


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    """Until it holds; `condition` may do some work each time that it is looked at."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.005)


def test_where_nobody_listens_each_signal_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with deaf_port() as endpoint, working(endpoint) as work:
        began = time.monotonic()

        def batches_have_failed() -> bool:
            work.do()
            return time.monotonic() - began > 4.0

        wait_for(batches_have_failed, "four seconds of work")
        work.do_without_waiting(MANY)
    for signal in ("spans", "metrics"):
        (line,) = lines(caplog, signal)
        assert line.startswith(f"{signal} are dropped until the collector takes them: ")
        assert "UNAVAILABLE" in line


def test_a_port_that_never_answers_holds_up_neither_work_nor_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with mute_port() as endpoint, working(endpoint) as work:

        def told() -> bool:
            work.do(QUEUE)
            return all(lines(caplog, signal) for signal in ("spans", "metrics"))

        wait_for(told, "a line for each signal")
        work.do_without_waiting(MANY)
    assert [len(lines(caplog, signal)) for signal in ("spans", "metrics")] == [1, 1]


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNKNOWN])
def test_a_collector_that_refuses_is_one_line_with_its_code(
    caplog: pytest.LogCaptureFixture, code: grpc.StatusCode
) -> None:
    with Collector() as collector:
        collector.answers(code=code)
        with working(collector.endpoint) as work:

            def refused_twice() -> bool:
                work.do()
                return collector.spans.asked > 2 and collector.metrics.asked > 2

            wait_for(refused_twice, "more than one batch")
    for signal in ("spans", "metrics"):
        (line,) = lines(caplog, signal)
        assert code.name in line and "no more room" in line
    assert collector.all_spans() == []


def test_a_collector_slower_than_the_spans_are_made_loses_some_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Collector() as collector:
        collector.answers(after_s=0.3)
        with working(collector.endpoint) as work:

            def told() -> bool:
                work.do(QUEUE)
                return len(collector.spans.taken) > 5

            wait_for(told, "five slow batches")
            assert lines(caplog, "spans") == [
                "spans are dropped: the collector takes them more slowly than they are made"
            ]
            collector.answers()
            before = len(collector.all_spans())
            wait_for(lambda: len(collector.all_spans()) >= before + QUEUE, "what had waited")
    assert len(lines(caplog, "spans")) == 1


def test_a_stop_gives_up_on_a_collector_that_answers_too_slowly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Collector() as collector:
        collector.answers(after_s=2.0)
        # `working` times the stop: four batches of two seconds wait for it.
        with working(collector.endpoint) as work:
            work.do(QUEUE)
            wait_for(lambda: collector.spans.asked > 0, "the first batch")
    (line,) = lines(caplog, "spans")
    assert line.startswith("the last spans are dropped: ")


def test_each_time_it_goes_and_each_time_it_comes_back_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = Collector()
    collector.start()
    with working(collector.endpoint) as work:

        def said(number: int) -> bool:
            work.do()
            return all(len(lines(caplog, each)) == number for each in ("spans", "metrics"))

        def more_taken_than(spans: int) -> bool:
            work.do()
            return len(collector.all_spans()) > spans

        wait_for(lambda: more_taken_than(0), "spans taken")
        for number in (1, 3):
            collector.stop()
            wait_for(partial(said, number), "a line that it is away")
            collector.start()
            wait_for(partial(said, number + 1), "a line that it is back")
            taken = len(collector.all_spans())
            wait_for(partial(more_taken_than, taken), "spans taken again")
    collector.stop()
    for signal in ("spans", "metrics"):
        away, back, *again = lines(caplog, signal)
        assert away.startswith(f"{signal} are dropped until the collector takes them: ")
        assert back.startswith(f"the collector takes {signal} again, after ")
        assert [x[:20] for x in again] == [away[:20], back[:20]]


def test_what_an_exporter_of_somebody_else_logs_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    with deaf_port() as endpoint, working(endpoint):
        theirs.warning("a word of another exporter")
    assert "a word of another exporter" in caplog.messages
