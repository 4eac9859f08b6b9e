"""Which requests are exported is for the caller, and for OpenTelemetry's own variables, to say."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from pd_grpc.client import Client
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2_grpc
from tests.backends.system import RunningSystem, running_up
from tests.system.asking import request
from tests.telemetry.collector import Collector

pytestmark = pytest.mark.longest

WHOLE = {"pd.request", "pd.prefill_request", "pd.compute", "pd.reserve", "pd.decode"}
"""Spans of all three servers; the last to end are among them."""


@contextmanager
def sampled_by(logs: Path, sampler: str, ratio: str) -> Iterator[tuple[RunningSystem, Collector]]:
    """A system that samples so, and its collector."""
    variables = {
        "OTEL_TRACES_SAMPLER": sampler,
        "OTEL_TRACES_SAMPLER_ARG": ratio,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with (
        Collector() as collector,
        running_up(logs, "--otlp", collector.endpoint, **variables) as running,
    ):
        yield running, collector


def ask(running: RunningSystem, *traceparent: str, prompt: int = 40) -> int:
    """Ask with a stub that knows nothing of tracing; returns the number of tokens."""
    message = request(
        [n % 1000 + 3 for n in range(prompt)],
        Sampling(max_tokens=4, temperature=0.0, ignore_eos=True),
    )
    metadata = [("traceparent", each) for each in traceparent]
    with grpc.insecure_channel(running.endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return sum(len(m.token_ids) for m in stub.Generate(message, timeout=30, metadata=metadata))


def traces(collector: Collector) -> dict[str, set[str]]:
    """The names of the spans that have come, by trace id; without the steps, which serve many."""
    found: dict[str, set[str]] = {}
    for span in collector.all_spans():
        if span.name != "pd.step":
            found.setdefault(span.trace_id.hex(), set()).add(span.name)
    return found


def arrived(collector: Collector, trace_id: str) -> dict[str, set[str]]:
    """What has come, once this trace is there as a whole."""
    until = time.monotonic() + 20
    while not traces(collector).get(trace_id, set()) >= WHOLE:
        assert time.monotonic() < until, traces(collector)
        time.sleep(0.02)
    return traces(collector)


def logged(running: RunningSystem, what: str) -> list[str]:
    """The trace ids of the log lines that say so."""
    lines = [line for line in running.log().splitlines() if what in line]
    return [found[1] for line in lines if (found := re.search(r"trace_id=([0-9a-f]{32})\b", line))]


def test_a_request_that_is_not_sampled_leaves_nothing_but_a_trace_id_in_the_log(
    tmp_path: Path,
) -> None:
    with sampled_by(tmp_path, "parentbased_traceidratio", "0") as (running, collector):
        assert ask(running) == ask(running, f"00-{'aa' * 16}-{'cd' * 8}-00") == 4
        for traceparent in ([], [f"00-{'bb' * 16}-{'cd' * 8}-00"]):
            with pytest.raises(grpc.RpcError) as failed:
                ask(running, *traceparent, prompt=40_000)
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        # The caller's decision goes before the ratio; when its trace is there, so would the others.
        assert ask(running, f"00-{'cc' * 16}-{'cd' * 8}-01") == 4
        assert set(arrived(collector, "cc" * 16)) == {"cc" * 16}
        assert [span.name for span in collector.all_spans() if span.name == "pd.step"] == []
        new, given = logged(running, "event=request_failed")
    assert given == "bb" * 16
    assert new not in ("aa" * 16, "bb" * 16, "0" * 32)


def test_a_trace_is_sampled_by_its_id_whole_or_not_at_all_whatever_its_caller_decided(
    tmp_path: Path,
) -> None:
    # By its last 8 bytes, as the sampler of OpenTelemetry reads it.
    low, high = f"{1:032x}", "f" * 32
    with sampled_by(tmp_path, "traceidratio", "0.5") as (running, collector):
        for trace_id in (high, low):
            assert ask(running, f"00-{trace_id}-{'cd' * 8}-01") == 4
        assert set(arrived(collector, low)) == {low}
        with Client(running.endpoint) as client:
            answers = [client.generate("some words", max_tokens=3) for _ in range(24)]
            for answer in answers:
                answer.collect()
        sampled = [a.trace_id for a in answers if int(a.trace_id[16:], 16) < 2**63]
        assert 0 < len(sampled) < 24
        for trace_id in sampled:
            arrived(collector, trace_id)
        assert set(traces(collector)) == {low, *sampled}
