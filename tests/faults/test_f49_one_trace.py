"""F49: a request is one trace on router, P and D, however many others are in flight with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

import grpc.aio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.protocol.sampling import Sampling
from pd_grpc.telemetry import names
from pd_grpc.v1 import inference_pb2_grpc
from tests.cluster import cluster
from tests.system.asking import request

REQUESTS = 24
FAILS = 7
"""This one is too large for any D, and its trace tells so."""
ROLES = {"router", "prefill", "decode"}


def _trace(n: int) -> str:
    return f"{0xABC000 + n:032x}"


async def _ask(stub: inference_pb2_grpc.InferenceServiceStub, n: int) -> None:
    sampling = Sampling(max_tokens=9000 if n == FAILS else 4, temperature=0.0, ignore_eos=True)
    metadata = (("traceparent", f"00-{_trace(n)}-{'cd' * 8}-01"),)
    call = stub.Generate(request([5 + n] * (20 + n), sampling), timeout=60, metadata=metadata)
    with contextlib.suppress(grpc.aio.AioRpcError) if n == FAILS else contextlib.nullcontext():
        async for _ in call:
            pass


def _attribute(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes[name]


async def test_each_of_many_requests_has_its_own_trace_through_every_process() -> None:
    """F49: through the prepare pool's futures, the engine threads and a failure on the way."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with (
        cluster(prefills=2, decodes=2, provider=provider) as servers,
        servers.client() as stub,
    ):
        await asyncio.gather(*(_ask(stub, n) for n in range(REQUESTS)))
    of_trace: dict[str, list[ReadableSpan]] = defaultdict(list)
    for span in exporter.get_finished_spans():
        if span.name != names.SPAN_STEP:  # the engine's, shared by requests
            of_trace[f"{span.context.trace_id:032x}"].append(span)
    assert set(of_trace) == {_trace(n) for n in range(REQUESTS)}
    for n in range(REQUESTS):
        # A call has no transfer's name, and belongs to the trace like the work that makes it.
        spans = [span for span in of_trace[_trace(n)] if span.name.startswith("pd.")]
        assert len({_attribute(span, names.ATTR_TRANSFER_ID) for span in spans}) == 1
        outcomes = {_attribute(span, names.ATTR_OUTCOME) for span in spans}
        roles = {_attribute(span, names.ATTR_ROLE) for span in spans}
        if n == FAILS:
            assert {"router", "prefill"} <= roles and "TOO_LARGE" in outcomes
        else:
            assert (roles, outcomes) == (ROLES, {"ok"})
