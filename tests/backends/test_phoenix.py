"""A trace of a real system, read back from a real backend: Arize Phoenix."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import pytest

from pd_grpc.client import Client
from pd_grpc.protocol.faults import Fault
from tests.backends.phoenix import BackendSpan, Phoenix
from tests.backends.system import RunningSystem, running_up

pytestmark = [
    pytest.mark.phoenix,
    pytest.mark.longest,
    # Phoenix takes ten seconds to start, and a minute where others work too.
    pytest.mark.timeout(240),
]

MARKER = "marzipan"
TREE = {
    "pd.request": "",
    "pd.route": "pd.request",
    "pd.prefill_request": "pd.request",
    "pd.queue": "pd.prefill_request",
    "pd.prepare": "pd.prefill_request",
    "pd.allocate": "pd.prepare",
    "pd.compute": "pd.prefill_request",
    "pd.send": "pd.prefill_request",
    "pd.first_token": "pd.prefill_request",
    "pd.reserve": "pd.allocate",
    "pd.receive": "pd.allocate",
    "pd.decode": "pd.request",
}
"""Whose child each span of a request is, by section 8 of the design."""
ROLE = {
    "router": {"pd.request", "pd.route"},
    "prefill": {
        "pd.prefill_request",
        "pd.queue",
        "pd.prepare",
        "pd.allocate",
        "pd.compute",
        "pd.send",
        "pd.first_token",
    },
    "decode": {"pd.reserve", "pd.receive", "pd.decode"},
}


@pytest.fixture(scope="module")
def system(phoenix: Phoenix, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """A router, a P and a D that send their spans to Phoenix."""
    logs = tmp_path_factory.mktemp("up")
    # Phoenix takes traces alone.
    variables = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRICS_EXPORTER": "none"}
    with running_up(logs, "--otlp", phoenix.otlp, **variables) as running:
        yield running
        assert "telemetry.exporting" not in running.log(), "it has taken everything"


def arrived(phoenix: Phoenix, trace_id: str, names: set[str]) -> dict[str, BackendSpan]:
    """The spans of a trace, once these are among them."""
    until = time.monotonic() + 30
    while True:
        spans = phoenix.trace(trace_id)
        missing = names - {span.name for span in spans.values()}
        if not missing:
            return spans
        assert time.monotonic() < until, f"not arrived: {missing}"
        time.sleep(0.1)


def above(span: BackendSpan, spans: Mapping[str, BackendSpan]) -> str:
    """The name of the nearest of our own spans above; between them are those of the calls."""
    parent = spans.get(span.parent)
    while parent is not None and not parent.name.startswith("pd."):
        parent = spans.get(parent.parent)
    return "" if parent is None else parent.name


def test_a_request_is_one_tree_over_router_prefill_and_decode(
    phoenix: Phoenix, system: RunningSystem
) -> None:
    with Client(system.endpoint) as client:
        answer = client.generate(f"{MARKER} " * 80, max_tokens=6, ignore_eos=True)
        assert len(answer.collect().token_ids) == 6
    spans = arrived(phoenix, answer.trace_id, set(TREE))
    ours = [span for span in spans.values() if span.name in TREE]
    assert {(span.name, above(span, spans)) for span in ours} == set(TREE.items())
    for role, names in ROLE.items():
        assert {span.name for span in ours if span.attributes["pd.role"] == role} == names
    assert len({span.attributes["pd.transfer_id"] for span in ours}) == 1
    for span in ours:
        assert span.attributes["pd.attempt"] == 1, span.name
        assert span.attributes["pd.outcome"] == "ok", span.name
        assert span.status != "ERROR", span.name
    by_name = {span.name: span for span in ours}
    assert by_name["pd.compute"].events.count("pd.chunk") >= 1
    assert by_name["pd.send"].events.count("pd.ack") >= 1
    assert by_name["pd.send"].attributes["pd.exposed_s"] >= 0
    assert by_name["pd.request"].attributes["pd.prompt_tokens"] > 80


def test_a_request_that_failed_has_error_code_and_reason(
    phoenix: Phoenix, system: RunningSystem
) -> None:
    with Client(system.endpoint) as client:
        answer = client.generate(f"{MARKER} " * 9000, max_tokens=6)
        with pytest.raises(Fault, match="TOO_LARGE"):
            answer.collect()
    spans = arrived(phoenix, answer.trace_id, {"pd.request", "pd.route"})
    (request,) = [span for span in spans.values() if span.name == "pd.request"]
    assert request.status == "ERROR"
    assert request.message == "TOO_LARGE"
    assert request.attributes["pd.outcome"] == "TOO_LARGE"
    assert request.attributes["error.type"] == "TOO_LARGE"
    assert request.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    for span in spans.values():
        if span.name.startswith("pd."):
            assert span.attributes["pd.outcome"] in ("ok", "TOO_LARGE"), span.name


def test_two_requests_are_two_traces_and_two_transfers(
    phoenix: Phoenix, system: RunningSystem
) -> None:
    with Client(system.endpoint) as client:
        first = client.generate("one", max_tokens=2)
        second = client.generate("two", max_tokens=2)
        first.collect()
        second.collect()
    assert first.trace_id != second.trace_id
    found = [
        {
            span.attributes["pd.transfer_id"]
            for span in arrived(phoenix, each.trace_id, set(TREE)).values()
            if span.name in TREE
        }
        for each in (first, second)
    ]
    assert len(found[0]) == len(found[1]) == 1
    assert found[0] != found[1]


def test_neither_prompt_nor_answer_is_in_what_the_backend_keeps(
    phoenix: Phoenix, system: RunningSystem
) -> None:
    with Client(system.endpoint) as client:
        answer = client.generate(f"{MARKER} " * 20, max_tokens=8, ignore_eos=True)
        text = answer.collect().text
    arrived(phoenix, answer.trace_id, set(TREE))
    # What is kept is searched rightly: the trace's id is found in it.
    assert phoenix.holds(answer.trace_id)
    assert not phoenix.holds(MARKER)
    assert text and not phoenix.holds(text)
