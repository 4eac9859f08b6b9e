"""A router in front of scripted instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.v1 import (
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    types_pb2,
)
from tests.router.scripted import Scripted
from tests.waiting import LIMIT_S

VOCAB = 32000


@dataclass
class Site:
    """One P, two Ds and a router, none of which holds anything at the end of a test."""

    router: RouterServer
    p: Scripted
    d1: Scripted
    d2: Scripted
    stub: inference_pb2_grpc.InferenceServiceStub
    admin: admin_pb2_grpc.AdminServiceStub
    spans: InMemorySpanExporter

    def generate(self, timeout: float | None = None, **fields: Any) -> Any:
        """Open Generate; `sampling` defaults to four greedy tokens, the prompt to three ids."""
        if not {"text", "messages", "token_ids"} & fields.keys():
            fields["token_ids"] = inference_pb2.TokenIds(ids=[5, 6, 7])
        fields.setdefault("sampling", sampling_pb2.SamplingParams(max_tokens=4, temperature=0))
        return self.stub.Generate(inference_pb2.GenerateRequest(**fields), timeout=timeout)

    async def answer(self, **fields: Any) -> list[inference_pb2.GenerateResponse]:
        """Every message of a whole answer."""
        return [message async for message in self.generate(**fields)]

    async def fault(self, **fields: Any) -> Fault:
        """The fault a request ends with."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.answer(**fields)
        fault: Fault | TransportFault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault), fault
        return fault


def config_for(p: Scripted, *decodes: Scripted, **fields: Any) -> RouterConfig:
    return RouterConfig(
        name="r1",
        prefill=(p.endpoint,),
        decode=tuple(d.endpoint for d in decodes),
        grace_s=0.3,
        settle_s=0.2,
        **fields,
    )


async def until_all_ready(router: RouterServer) -> None:
    """Wait until every configured instance takes requests."""
    while not all(view.ready for view in router.discovery.instances):
        await router.discovery.changed()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with sited(SimTokenizer(VOCAB)) as served:
        yield served


@pytest.fixture
async def early_site() -> AsyncIterator[Site]:
    """One that answers two seconds before a request's time is over: none of them is lost to a busy
    machine, whose client would end the request itself."""
    async with sited(SimTokenizer(VOCAB), hop_margin_s=2.0) as served:
        yield served


@asynccontextmanager
async def sited(tokenizer: Tokenizer, **fields: Any) -> AsyncIterator[Site]:
    """A site whose router has this tokenizer and these settings."""
    p = Scripted(types_pb2.ROLE_PREFILL, "p1")
    d1 = Scripted(types_pb2.ROLE_DECODE, "d1")
    d2 = Scripted(types_pb2.ROLE_DECODE, "d2")
    for instance in (p, d1, d2):
        await instance.start()
    provider, spans = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    config = config_for(p, d1, d2, **fields)
    router = await start_router(config, tokenizer, tracer_provider=provider)
    await asyncio.wait_for(until_all_ready(router), LIMIT_S)
    try:
        async with grpc.aio.insecure_channel(router.endpoint) as channel:
            yield Site(
                router,
                p,
                d1,
                d2,
                inference_pb2_grpc.InferenceServiceStub(channel),
                admin_pb2_grpc.AdminServiceStub(channel),
                spans,
            )
        await asyncio.wait_for(router.in_flight.idle(), LIMIT_S)
        assert not router.in_flight.running(), "a request is still in flight"
        loads = [router.routing.prefill_load, router.routing.decode_load]
        endpoints = [instance.endpoint for instance in (p, d1, d2)]
        assert {load.in_flight(e) for load in loads for e in endpoints} == {(0, 0)}
    finally:
        await router.stop()
        for instance in (p, d1, d2):
            await instance.stop()
