"""Real servers of all three roles in one process, on the sim engine unless told otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.decode.server import DecodeServer, start_decode
from pd_grpc.engine.base import Engine
from pd_grpc.engine.sim import SimEngine
from pd_grpc.prefill.server import PrefillServer, start_prefill
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import DecodeConfig, EngineConfig, PrefillConfig, RouterConfig
from pd_grpc.protocol.interception import NONE, Interceptors
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from tests.blocks.emptying import assert_whole
from tests.waiting import until

SIM: dict[str, Any] = {
    "engine": "sim",
    "num_blocks": 256,
    "chunk_tokens": 64,
    # Most tests look at the bytes of chunks; those of another transport name it.
    "transports": ("inline",),
}


@dataclass
class Cluster:
    """A router with its instances."""

    router: RouterServer
    prefills: list[PrefillServer] = field(default_factory=list)
    decodes: list[DecodeServer] = field(default_factory=list)

    def pools(self) -> list[BlockPool]:
        """Every pool of the cluster."""
        return [p.pool for p in self.prefills] + [d.pool for d in self.decodes]

    def caches(self) -> list[PrefixCache]:
        """What each pool keeps for prompts that begin alike."""
        ps = [p.runtime.machine.cache for p in self.prefills]
        return ps + [d.machine.ledger.cache for d in self.decodes]

    async def settled(self) -> None:
        """Wait until every block is back, free or cached, and check that none was lost."""
        for pool in self.pools():
            await until(partial(_all_back, pool))
            pool.check()
        for cache in self.caches():
            cache.check()
        # The last word of a request may still be on its way; the listing itself is asked over gRPC.
        await until(self._nothing_in_flight)
        endpoints = [self.router.endpoint]
        endpoints += [server.endpoint for server in self.prefills]
        endpoints += [server.endpoint for server in self.decodes]
        for endpoint in endpoints:
            async with rpc.aio_channel(endpoint, RouterConfig(), RouterConfig()) as channel:
                admin = admin_pb2_grpc.AdminServiceStub(channel)
                listed = await admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=60)
                assert list(listed.transfers) == []

    def _nothing_in_flight(self) -> bool:
        views = [p.view for p in self.prefills] + [d.view for d in self.decodes]
        return not self.router.in_flight.running() and not any(v.transfers() for v in views)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
        """A stub of the router."""
        async with rpc.aio_channel(self.router.endpoint, RouterConfig(), RouterConfig()) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)


@contextlib.asynccontextmanager
async def cluster(
    prefills: int = 1,
    decodes: int = 1,
    *,
    aggregated: bool = False,
    load: Callable[[EngineConfig], Engine] = SimEngine,
    provider: TracerProvider | None = None,
    meters: MeterProvider | None = None,
    prefill_wire: Interceptors = NONE,
    decode_wire: Interceptors = NONE,
    router_wire: Interceptors = NONE,
    prefill_settings: dict[str, Any] | None = None,
    decode_settings: dict[str, Any] | None = None,
    router_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """A running cluster, ready for requests; at the end every block must be back."""
    common = {**SIM, **settings}
    async with contextlib.AsyncExitStack() as stack:
        ds = []
        for i in range(decodes):
            config = DecodeConfig(**{"name": f"d{i}", **common, **(decode_settings or {})})
            d = await start_decode(
                config,
                load(config),
                tracer_provider=provider,
                meter_provider=meters,
                interceptors=decode_wire,
            )
            stack.push_async_callback(d.stop)
            ds.append(d)
        ps = []
        for i in range(0 if aggregated else prefills):
            pconfig = PrefillConfig(**{"name": f"p{i}", **common, **(prefill_settings or {})})
            p = await start_prefill(
                pconfig,
                load(pconfig),
                tracer_provider=provider,
                meter_provider=meters,
                interceptors=prefill_wire,
            )
            stack.push_async_callback(p.stop)
            ps.append(p)
        rconfig = RouterConfig(
            **{
                "name": "router",
                "engine": "sim",
                "prefill": tuple(p.endpoint for p in ps),
                "decode": tuple(d.endpoint for d in ds),
                "aggregated": aggregated,
                **(router_settings or {}),
            }
        )
        tokenizer = ds[0].engine.tokenizer()
        router = await start_router(
            rconfig,
            tokenizer,
            tracer_provider=provider,
            meter_provider=meters,
            interceptors=router_wire,
        )
        stack.push_async_callback(router.stop, 0.0)
        await until(lambda: router.ready)
        running = Cluster(router, ps, ds)
        yield running
        await running.settled()
        for cache in running.caches():
            assert_whole(cache.pool)


def _all_back(pool: BlockPool) -> bool:
    return pool.free == pool.total
