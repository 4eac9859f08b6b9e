"""P's part of a trace: which spans there are, whose children they are, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.engine.base import EngineFault, PrefillChunk, Sampled
from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol.messages import seconds
from tests.prefill.cluster import Cluster, request_to, running
from tests.waiting import until

NOBODY = "127.0.0.1:1"
QUEUE, PREPARE, ALLOCATE = "pd.queue", "pd.prepare", "pd.allocate"


class Broken(SimEngine):
    """Computes nothing."""

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        raise EngineFault("broken")


class Trace:
    """The spans P has ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        spans = [span for span in self._exporter.get_finished_spans() if span.name == name]
        return sorted(spans, key=lambda span: span.start_time or 0)

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def length_s(self, name: str) -> float:
        return sum(((s.end_time or 0) - (s.start_time or 0)) / 1e9 for s in self.named(name))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as made:
        yield made


def outcome(span: ReadableSpan) -> object:
    return (span.attributes or {})["pd.outcome"]


def is_child(child: ReadableSpan, parent: ReadableSpan) -> bool:
    return child.parent is not None and child.parent.span_id == parent.context.span_id


async def test_a_request_is_one_tree_of_stages_that_agree_with_its_timings(
    cluster: Cluster,
) -> None:
    trace = Trace()
    p, d = await cluster.prefill(trace.provider, sim_time_scale=0.2), await cluster.decode()
    request = request_to(d, tokens=50)
    prefill, _ = await cluster.run(p, d, request)
    root = trace.one("pd.prefill_request")
    assert outcome(root) == "ok"
    for name in (PREPARE, "pd.compute", "pd.send", "pd.first_token"):
        span = trace.one(name)
        assert is_child(span, root) and outcome(span) == "ok"
        assert (span.attributes or {})["pd.transfer_id"] == request.ref.transfer_id
        assert (span.attributes or {})["pd.attempt"] == 1
    assert all(is_child(span, root) for span in trace.named(QUEUE))
    assert is_child(trace.one(ALLOCATE), trace.one(PREPARE))
    timings = prefill.messages[-1].handed_off.timings
    exposed_s = (trace.one("pd.send").attributes or {})["pd.exposed_s"]
    assert exposed_s == pytest.approx(seconds(timings.exposed_send), abs=1e-3)
    for name, value in (
        (QUEUE, timings.queue),
        (PREPARE, timings.prepare),
        (ALLOCATE, timings.allocate),
        ("pd.compute", timings.compute),
        ("pd.first_token", timings.first_token),
    ):
        assert trace.length_s(name) == pytest.approx(seconds(value), abs=1e-3)


async def test_compute_has_an_event_per_chunk_and_send_one_per_range(cluster: Cluster) -> None:
    trace = Trace()
    p, d = await cluster.prefill(trace.provider), await cluster.decode()
    await cluster.run(p, d, request_to(d, tokens=40))
    chunks = [event.attributes or {} for event in trace.one("pd.compute").events]
    assert [chunk["pd.tokens"] for chunk in chunks] == [16, 16, 8]
    ranges = [event.attributes or {} for event in trace.one("pd.send").events]
    sent = sum(int(str(r["pd.block_count"])) * int(str(r["pd.layer_count"])) for r in ranges)
    assert sent == 10 * 4


async def test_a_request_that_fails_ends_its_spans_with_the_reason(cluster: Cluster) -> None:
    trace = Trace()
    p = await cluster.prefill(trace.provider)
    await cluster.run_prefill(p, request_to(NOBODY))
    assert outcome(trace.one("pd.prefill_request")) == "DECODE_LOST"
    assert outcome(trace.one(QUEUE)) == "DECODE_LOST"
    bad = request_to(NOBODY, max_tokens=0)
    await cluster.run_prefill(p, bad)
    assert outcome(trace.named("pd.prefill_request")[-1]) == "BAD_REQUEST"


async def test_each_allocate_is_a_span_of_one_preparation(cluster: Cluster) -> None:
    trace = Trace()
    p = await cluster.prefill(trace.provider)
    full, free = await cluster.decode(allocate_queue=1), await cluster.decode()
    occupied = full.pool.reserve(full.pool.free, owner="the test")
    waiting = asyncio.create_task(cluster.run_prefill(p, request_to(full)))
    await until(lambda: len(full.view.transfers()) == 1)
    prefill, _ = await cluster.run(p, free, request_to(full, free))
    assert prefill.fault is None
    waiting.cancel()
    await asyncio.wait([waiting])
    occupied.release()
    handed_off = next(s for s in trace.named("pd.prefill_request") if outcome(s) == "ok")
    (prepare,) = [span for span in trace.named(PREPARE) if is_child(span, handed_off)]
    asked = [span for span in trace.named(ALLOCATE) if is_child(span, prepare)]
    assert [outcome(span) for span in asked] == ["QUEUE_FULL", "ok"]


async def test_each_step_is_a_span_of_its_own_linked_to_what_it_computes(cluster: Cluster) -> None:
    trace = Trace()
    p, d = await cluster.prefill(trace.provider), await cluster.decode()
    await cluster.run(p, d, request_to(d, tokens=40))
    compute, steps = trace.one("pd.compute"), trace.named("pd.step")
    assert [(step.attributes or {})["pd.tokens"] for step in steps] == [16, 16, 8]
    for step in steps:
        assert step.parent is None and outcome(step) == "ok"
        assert [link.context for link in step.links] == [compute.context]
    assert steps[0].start_time == compute.start_time
    chunks = [event.timestamp for event in compute.events]
    assert [step.end_time for step in steps] == chunks


async def test_a_step_that_fails_says_so(cluster: Cluster) -> None:
    trace = Trace()
    p, d = await cluster.prefill(trace.provider, Broken), await cluster.decode()
    prefill, _ = await cluster.run(p, d, request_to(d, tokens=40))
    assert prefill.fault is not None
    assert outcome(trace.one("pd.step")) == "ENGINE_ERROR"
