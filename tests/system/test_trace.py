"""One request is one trace, whose stages follow one another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.cluster import cluster
from tests.system.asking import request
from tests.telemetry.recorder import Recorder
from tests.waiting import until

CALLS = {
    "pd_grpc.v1.InferenceService/Generate",
    "pd_grpc.v1.PrefillService/Prefill",
    "pd_grpc.v1.DecodeService/Allocate",
    "pd_grpc.v1.TransferService/Transfer",
    "pd_grpc.v1.DecodeService/SendFirstToken",
}
SPANS = {
    "pd.request",
    "pd.route",
    "pd.prefill_request",
    "pd.queue",
    "pd.prepare",
    "pd.allocate",
    "pd.compute",
    "pd.send",
    "pd.first_token",
    "pd.reserve",
    "pd.receive",
    "pd.decode",
}
STAGES_OF_P = ("pd.queue", "pd.prepare", "pd.compute", "pd.first_token")


def _check_calls(calls: Sequence[ReadableSpan]) -> None:
    """Each call between two instances is seen at both ends, the served one a child of the one made;
    the client's own is seen at the router alone."""
    traced = [s for s in calls if f"{s.context.trace_id:032x}" == "ab" * 16]
    assert {s.name for s in traced} == CALLS
    made = {s.context.span_id: s for s in traced if s.kind is SpanKind.CLIENT}
    served = [s for s in traced if s.kind is SpanKind.SERVER]
    assert len(served) == len(made) + 1
    parents = [made.get(s.parent.span_id) for s in served if s.parent is not None]
    assert sum(parent is None for parent in parents) == 1
    for span, parent in zip(served, parents, strict=True):
        assert parent is None or parent.name == span.name
    for span in traced:
        assert span.attributes is not None
        assert span.attributes["rpc.response.status_code"] == "OK", (span.name, span.kind)
        assert span.attributes["pd.outcome"] == "ok"


async def test_a_request_is_one_trace_whose_stages_at_p_adjoin() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with cluster(provider=provider) as running:
        async with running.client() as stub:
            warm = request([7] * 64, Sampling(max_tokens=2, temperature=0.0))
            async for _ in stub.Generate(warm, timeout=60):
                pass
            exporter.clear()
            message = request(
                list(range(3, 1200)), Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
            )
            traceparent = ("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")
            async for _ in stub.Generate(message, timeout=60, metadata=(traceparent,)):
                pass
        await until(lambda: {s.name for s in exporter.get_finished_spans()} >= SPANS)
    spans = [s for s in exporter.get_finished_spans() if s.name != "pd.step"]
    of_request = [s for s in spans if s.name in SPANS]
    assert {s.name for s in of_request} == SPANS
    assert {f"{s.context.trace_id:032x}" for s in of_request} == {"ab" * 16}
    _check_calls([s for s in spans if s.name in CALLS])
    of_trace = [s for s in spans if f"{s.context.trace_id:032x}" == "ab" * 16]
    by_id = {s.context.span_id: s for s in of_trace}
    roots = [s for s in of_trace if s.parent is None or s.parent.span_id not in by_id]
    (root,) = roots
    assert (root.name, root.kind) == ("pd_grpc.v1.InferenceService/Generate", SpanKind.SERVER)
    for span in of_request:
        assert span.attributes is not None
        assert span.attributes["pd.outcome"] == "ok", span.name
        assert span.attributes["pd.attempt"] == 1
    assert len({(s.attributes or {})["pd.transfer_id"] for s in of_request}) == 1
    stages = [s for s in of_request if s.name in STAGES_OF_P]
    times = sorted((s.start_time or 0, s.end_time or 0, s.name) for s in stages)
    assert {name for _, _, name in times} == set(STAGES_OF_P)
    for (_, before, name), (after, _, following) in pairwise(times):
        assert abs(after - before) <= 1000, f"{after - before} ns from {name} to {following}"
    steps = [s for s in exporter.get_finished_spans() if s.name == "pd.step"]
    decode = next(s for s in of_request if s.name == "pd.decode")
    linked = [s for s in steps if any(x.context.span_id == decode.context.span_id for x in s.links)]
    assert len(linked) == 7, "seven steps follow the first token"


async def test_what_a_request_says_enters_no_span() -> None:
    recorder = Recorder()
    told = 987654321
    async with cluster(provider=recorder.provider) as running:
        bad = request([told] * 3, Sampling(max_tokens=2, temperature=0.0))
        (d,), (p,) = running.decodes, running.prefills
        sent = prefill_pb2.PrefillRequest(
            ref=types_pb2.TransferRef(transfer_id="t-1", attempt=1),
            token_ids=[told] * 3,
            sampling=bad.sampling,
            decodes=[prefill_pb2.DecodeTarget(endpoint=d.endpoint)],
        )
        for endpoint in (running.router.endpoint, d.endpoint):
            async with grpc.aio.insecure_channel(endpoint) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError, match=str(told)):
                    await anext(aiter(stub.Generate(bad, timeout=60)))
        async with grpc.aio.insecure_channel(p.endpoint) as channel:
            prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match=str(told)):
                await anext(aiter(prefill.Prefill(sent, timeout=60)))
        ended = {"pd.request", "pd.prefill_request"}
        await until(lambda: ended <= {span.name for span in recorder.spans})
    for span in recorder.spans:
        assert str(told) not in span.to_json(), span.name


async def test_a_client_that_leaves_in_mid_answer_is_no_defect_of_anybodys() -> None:
    recorder = Recorder()
    async with cluster(provider=recorder.provider) as running:
        async with running.client() as stub:

            async def leave(number: int) -> None:
                message = request(
                    [3 + number] * 40, Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
                )
                call = stub.Generate(message, timeout=30)
                for _ in range(1 + number % 3):
                    await call.read()
                call.cancel()

            for _ in range(5):
                await asyncio.gather(*(leave(number) for number in range(20)))
        await running.settled()
    ends = {(span.attributes or {}).get("pd.outcome") for span in recorder.spans}
    assert "CLIENT_GONE" in ends
    assert not {"ENGINE_ERROR", "UNKNOWN"} & ends
