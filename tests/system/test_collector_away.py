"""Real servers whose collector is away, silent, slow or full: no request notices, nor memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest

from pd_grpc.client import Client
from pd_grpc.telemetry.exporting import STOP_S
from pd_grpc.telemetry.otlp import ATTEMPT_S
from tests.backends.system import RunningSystem, running_up
from tests.telemetry.collector import Collector, deaf_port, mute_port

pytestmark = [pytest.mark.longest, pytest.mark.timeout(120)]

SERVERS = 3
QUICK = {
    "OTEL_BSP_SCHEDULE_DELAY": "50",
    "OTEL_BSP_MAX_QUEUE_SIZE": "256",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "64",
    "OTEL_METRIC_EXPORT_INTERVAL": "300",
    "PD_TRACES_KEPT": "0",
}
WARM, MEASURED = 60, 200
GROWTH_MIB = 3
"""What a server may grow by over `MEASURED` requests: 1 to 2 MiB is seen, and 4 on P and on D where
the queue of spans has no end."""
PLAIN_STOP_S = 30.0
"""What a stop may take where there is no collector at all, on a busy machine."""


@contextmanager
def slow_collector() -> Iterator[str]:
    """host:port of a collector that takes everything, after two seconds."""
    with Collector() as collector:
        collector.answers(after_s=2.0)
        yield collector.endpoint


@contextmanager
def full_collector() -> Iterator[str]:
    """host:port of a collector that has no room."""
    with Collector() as collector:
        collector.answers(code=grpc.StatusCode.RESOURCE_EXHAUSTED)
        yield collector.endpoint


def ask(endpoint: str, number: int) -> list[float]:
    """How long each of so many requests took, in seconds; all must be answered in full."""
    with Client(endpoint) as client, ThreadPoolExecutor(4) as pool:

        def one(n: int) -> float:
            began = time.monotonic()
            answer = client.generate(f"a question, the {n}th", max_tokens=12, ignore_eos=True)
            assert len(answer.collect().token_ids) == 12
            return time.monotonic() - began

        return list(pool.map(one, range(number)))


def mib(server: psutil.Process) -> float:
    """Resident memory."""
    return float(server.memory_info().rss) / (1 << 20)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until it holds, for a minute at most."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


@contextmanager
def stopped_in_time(running: RunningSystem) -> Iterator[None]:
    """The router stops, and then the others at the same time."""
    yield
    began = time.monotonic()
    running.process.terminate()
    assert running.process.wait(60) == 0
    assert time.monotonic() - began < 2 * STOP_S + PLAIN_STOP_S


@pytest.mark.parametrize("backend", [deaf_port, mute_port, full_collector, slow_collector])
def test_a_backend_that_is_down_or_slow_costs_no_request_and_no_memory(
    backend: Callable[[], contextlib.AbstractContextManager[str]], tmp_path: Path
) -> None:
    with (
        backend() as otlp,
        running_up(tmp_path, "--otlp", otlp, **QUICK) as running,
        stopped_in_time(running),
    ):
        ask(running.endpoint, WARM)
        before = {server.pid: mib(server) for server in running.servers()}
        assert len(before) == SERVERS
        took = ask(running.endpoint, MEASURED)
        grown = {server.pid: mib(server) - before[server.pid] for server in running.servers()}
        if backend is not slow_collector:
            for signal in ("spans", "metrics"):
                away = f"{signal} are dropped until the collector takes them"
                wait_for(partial(_have_said, running, away, SERVERS), away)
        log = running.log()
    # Requests that waited for exports would have taken as long as those, each of them.
    assert sum(took) < MEASURED * ATTEMPT_S / 2
    assert max(grown.values()) < GROWTH_MIB, grown
    warnings = [line for line in log.splitlines() if " WARNING " in line or " ERROR " in line]
    assert [line for line in warnings if "opentelemetry" in line] == []
    assert len([line for line in warnings if " telemetry.exporting " in line]) <= 2 * SERVERS


def test_spans_come_again_when_the_collector_does(tmp_path: Path) -> None:
    collector = Collector()
    collector.start()
    with (
        contextlib.closing(contextlib.ExitStack()) as stack,
        running_up(tmp_path, "--otlp", collector.endpoint, **QUICK) as running,
        stopped_in_time(running),
    ):
        stack.callback(collector.stop)
        for times in (1, 2):
            wait_for(lambda: _arrives(collector, running), "the trace of a request")
            collector.stop()
            for signal in ("spans", "metrics"):
                text = f"{signal} are dropped until the collector takes them"
                wait_for(partial(_say, running, text, times), text)
            collector.start()
            for signal in ("spans", "metrics"):
                text = f"the collector takes {signal} again, after "
                wait_for(partial(_say, running, text, times), text)
        wait_for(lambda: _arrives(collector, running), "the trace of a request")


def _have_said(running: RunningSystem, text: str, times: int) -> bool:
    """Whether the servers together have said so as often."""
    return running.log().count(text) == times


def _say(running: RunningSystem, text: str, times: int) -> bool:
    """Whether each server has said so as often; a request gives them spans to send."""
    ask(running.endpoint, 1)
    return _have_said(running, text, times * SERVERS)


def _arrives(collector: Collector, running: RunningSystem) -> bool:
    """Whether what is asked now becomes a trace there, with spans of all three servers."""
    with Client(running.endpoint) as client:
        answer = client.generate("a question", max_tokens=3)
        answer.collect()
    wanted = {"pd.request", "pd.prefill_request", "pd.decode"}

    def whole() -> bool:
        trace = bytes.fromhex(answer.trace_id)
        names = {span.name for span in collector.all_spans() if span.trace_id == trace}
        return names >= wanted

    wait_for(whole, "spans of all three servers")
    return True
