"""Two of each instance behind a router, of which the first that is asked fails, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.v1 import (
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    types_pb2,
)
from tests.router.answers import TEXT, hand_over, rest_of
from tests.router.conftest import VOCAB, until_all_ready
from tests.router.scripted import Script, Scripted, last, never, tokens
from tests.waiting import LIMIT_S

STUCK = Fault(Reason.ENGINE_STUCK, "the engine has stopped")


@dataclass
class Pairs:
    """Two Ps and two Ds behind a router. The first of each is asked first, and fails."""

    router: RouterServer
    p1: Scripted
    p2: Scripted
    d1: Scripted
    d2: Scripted
    stub: inference_pb2_grpc.InferenceServiceStub
    admin: admin_pb2_grpc.AdminServiceStub
    spans: InMemorySpanExporter
    metrics: InMemoryMetricReader

    def ask(self, **fields: Any) -> Any:
        fields.setdefault("sampling", sampling_pb2.SamplingParams(max_tokens=9, temperature=0))
        prompt = inference_pb2.TokenIds(ids=[5, 6, 7])
        return self.stub.Generate(inference_pb2.GenerateRequest(token_ids=prompt, **fields))

    async def answer(self, **fields: Any) -> list[inference_pb2.GenerateResponse]:
        return await asyncio.wait_for(rest_of(self.ask(**fields)), LIMIT_S)

    def counted(self, metric: str) -> dict[str, float]:
        """A counter's values by reason, of the reasons that have come up."""
        data = self.metrics.get_metrics_data()
        found = [] if data is None else data.resource_metrics
        metrics = [m for r in found for scope in r.scope_metrics for m in scope.metrics]
        points = [p for m in metrics if m.name == metric for p in m.data.data_points]
        values = {}
        for point in points:
            assert isinstance(point, NumberDataPoint) and point.attributes is not None
            reason = str(point.attributes.get("reason", ""))
            if point.value or not reason:
                values[reason] = float(point.value)
        return values


@contextlib.asynccontextmanager
async def pairs(**settings: Any) -> AsyncIterator[Pairs]:
    prefill, decode = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE
    p1, p2 = Scripted(prefill, "p1"), Scripted(prefill, "p2")
    d1, d2 = Scripted(decode, "d1"), Scripted(decode, "d2")
    instances = [p1, p2, d1, d2]
    for instance in instances:
        await instance.start()
    config = RouterConfig(
        prefill=(p1.endpoint, p2.endpoint),
        decode=(d1.endpoint, d2.endpoint),
        grace_s=0.3,
        settle_s=0.2,
        **settings,
    )
    provider, spans, metrics = TracerProvider(), InMemorySpanExporter(), InMemoryMetricReader()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    router = await start_router(
        config,
        SimTokenizer(VOCAB),
        tracer_provider=provider,
        meter_provider=MeterProvider([metrics]),
    )
    await asyncio.wait_for(until_all_ready(router), LIMIT_S)
    try:
        async with grpc.aio.insecure_channel(router.endpoint) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            yield Pairs(router, p1, p2, d1, d2, stub, admin, spans, metrics)
        await asyncio.wait_for(router.in_flight.idle(), LIMIT_S)
        assert not router.in_flight.running(), "a request is still in flight"
        loads = [router.routing.prefill_load, router.routing.decode_load]
        held = {load.in_flight(i.endpoint) for load in loads for i in instances}
        assert held == {(0, 0)}, "something is still charged"
    finally:
        await router.stop()
        for instance in instances:
            await instance.stop()


def saying(count: int, then: Fault | None = None) -> Script:
    """The first `count` tokens of the text, then a failure, or silence."""

    async def script(request: Any) -> AsyncIterator[Any]:
        if count:
            yield tokens(*TEXT[:count])
        if then is not None:
            raise then
        await never()

    return script


async def go_on(request: inference_pb2.GenerateRequest) -> AsyncIterator[Any]:
    """As a D does: what the client has is not said again, and counts."""
    known = len(request.generated_token_ids)
    for token in TEXT[known:]:
        yield tokens(token)
    message = last(reason=types_pb2.FINISH_REASON_STOP)
    message.usage.completion_tokens = len(TEXT)
    yield message


def go_on_elsewhere(site: Pairs, failing: Script) -> None:
    site.p1.script = site.p2.script = hand_over
    site.d1.script, site.d2.script = failing, go_on


def text_of(messages: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


def tokens_of(messages: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]
