"""F52: a stream that its caller gives up ends on the server too, whichever method it is of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pd_grpc.protocol.messages import layout_to_proto
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.protocol.serving import HandlerRegistry
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2_grpc,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    types_pb2,
)
from tests.cluster import Cluster, cluster
from tests.prefill.cluster import request_to
from tests.system.asking import request
from tests.waiting import until

SLOW = Sampling(max_tokens=3000, temperature=0.0, ignore_eos=True)
EACH = 6
"""Streams of each method at once."""

Open = Callable[[Cluster, grpc.aio.Channel, int], Awaitable[Any]]
"""Opens one stream, numbered from 0, and returns its call once the server has it."""


async def _generate(servers: Cluster, channel: grpc.aio.Channel, n: int) -> Any:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.Generate(request([5 + n] * 20, SLOW))
    await call.read()
    return call


async def _prefill(servers: Cluster, channel: grpc.aio.Channel, n: int) -> Any:
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    leg = request_to(servers.decodes[0], tokens=1500, random_seed=n).prefill()
    call = stub.Prefill(leg)
    await call.read()
    return call


async def _session(servers: Cluster, channel: grpc.aio.Channel, n: int) -> Any:
    call = decode_pb2_grpc.DecodeServiceStub(channel).Session()
    instance = types_pb2.Instance(name=f"odd-{n}", epoch=10, role=types_pb2.ROLE_PREFILL)
    layout = layout_to_proto(servers.decodes[0].engine.layout)
    hello = decode_pb2.Hello(instance=instance, layouts=[layout])
    await call.write(decode_pb2.SessionRequest(hello=hello))
    await call.read()
    return call


async def _transfer(servers: Cluster, channel: grpc.aio.Channel, n: int) -> Any:
    # In the name of P, and of a grant that nobody has heard of yet, so that it is held.
    d = servers.decodes[0]
    (session,) = d.machine.ledger.sessions.live()
    call = transfer_pb2_grpc.TransferServiceStub(channel).Transfer()
    ref = types_pb2.TransferRef(transfer_id="t", attempt=1, decode_epoch=d.instance.epoch)
    opening = transfer_pb2.TransferOpen(session_id=session.session_id, ref=ref, grant_id=f"g-{n}")
    await call.write(transfer_pb2.TransferRequest(open=opening))
    return call


async def _watch_transfers(servers: Cluster, channel: grpc.aio.Channel, n: int) -> Any:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    call = stub.WatchTransfers(admin_pb2.WatchTransfersRequest())
    await call.initial_metadata()
    return call


async def _watch_health(servers: Cluster, channel: grpc.aio.Channel, n: int) -> Any:
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    await call.read()
    return call


async def _reflect(servers: Cluster, channel: grpc.aio.Channel, n: int) -> Any:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call: Any = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await call.read()
    return call


def _of_router(servers: Cluster) -> tuple[str, HandlerRegistry]:
    return servers.router.endpoint, servers.router._control.handlers


def _of_p(servers: Cluster) -> tuple[str, HandlerRegistry]:
    return servers.prefills[0].endpoint, servers.prefills[0].control.handlers


def _of_d(servers: Cluster) -> tuple[str, HandlerRegistry]:
    return servers.decodes[0].endpoint, servers.decodes[0].control.handlers


def _of_shard(servers: Cluster) -> tuple[str, HandlerRegistry]:
    return servers.decodes[0].bulk.endpoint, servers.decodes[0].bulk._handlers


GENERATE = "/pd_grpc.v1.InferenceService/Generate"
WATCH_TRANSFERS = "/pd_grpc.v1.AdminService/WatchTransfers"
STREAMS = [
    (_of_router, _generate, GENERATE),
    (_of_router, _watch_transfers, WATCH_TRANSFERS),
    (_of_router, _reflect, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    (_of_p, _prefill, "/pd_grpc.v1.PrefillService/Prefill"),
    (_of_p, _watch_transfers, WATCH_TRANSFERS),
    (_of_d, _generate, GENERATE),
    (_of_d, _session, "/pd_grpc.v1.DecodeService/Session"),
    (_of_d, _watch_transfers, WATCH_TRANSFERS),
    (_of_d, _watch_health, "/grpc.health.v1.Health/Watch"),
    (_of_shard, _transfer, "/pd_grpc.v1.TransferService/Transfer"),
]


@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
async def test_streams_of_every_method_end_when_their_callers_leave(how: str) -> None:
    """F52: no handler goes on, and `cluster` finds every block free and nothing in flight."""
    async with cluster(sim_time_scale=10.0) as servers:
        for server, opening, method in STREAMS:
            endpoint, handlers = server(servers)
            others = _running(handlers, method)
            channel = grpc.aio.insecure_channel(endpoint)
            calls = await asyncio.gather(*(opening(servers, channel, n) for n in range(EACH)))
            await until(partial(_are, handlers, method, others + EACH))
            if how == "cancelled":
                for call in calls:
                    call.cancel()
            else:
                await channel.close(None)
            await until(partial(_are, handlers, method, others))
            await channel.close(None)
            await servers.settled()


def _running(handlers: HandlerRegistry, method: str) -> int:
    return list(handlers._running.values()).count(method)


def _are(handlers: HandlerRegistry, method: str, wanted: int) -> bool:
    return _running(handlers, method) == wanted
