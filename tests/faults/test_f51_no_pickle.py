"""F51: nothing that comes over a socket is ever unpickled, and nobody from outside reaches one."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from pd_grpc.decode.server import start_decode
from pd_grpc.engine.sim import SimEngine
from pd_grpc.prefill.server import start_prefill
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, RouterConfig
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.router.server import start_router
from pd_grpc.v1 import admin_pb2, decode_pb2, inference_pb2, prefill_pb2, transfer_pb2
from tests.cluster import cluster
from tests.system.asking import ask, request

FILES = (admin_pb2, decode_pb2, inference_pb2, prefill_pb2, transfer_pb2)
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


class _Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, crater: Path) -> None:
        self._crater = crater

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._crater,))


def _methods() -> list[str]:
    """The full name of every method of the protocol."""
    services = [s for file in FILES for s in file.DESCRIPTOR.services_by_name.values()]
    return [
        f"/{service.full_name}/{method.name}" for service in services for method in service.methods
    ]


async def _throw(channel: Any, method: str, bomb: bytes) -> grpc.StatusCode:
    """Send bytes as a message of `method`; a call that would go on for ever ends after a second."""
    call = channel.stream_stream(method)(timeout=1.0)
    try:
        await call.write(bomb)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # it was refused before it was written
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_pickle_sent_to_any_method_is_no_more_than_a_wrong_message(tmp_path: Path) -> None:
    """F51: on every endpoint, the shard's included."""
    crater = tmp_path / "crater"
    bombs = [pickle.dumps(_Bomb(crater), protocol) for protocol in (0, 4)]
    assert len(_methods()) >= 14
    async with cluster() as servers, servers.client() as stub:
        p, d = servers.prefills[0], servers.decodes[0]
        for endpoint in (servers.router.endpoint, p.endpoint, d.endpoint, d.bulk.endpoint):
            async with grpc.aio.insecure_channel(endpoint) as channel:
                thrown = [_throw(channel, method, b) for method in _methods() for b in bombs]
                codes = await asyncio.gather(*thrown)
                assert grpc.StatusCode.UNAVAILABLE not in codes, "the server is still there"
        assert not crater.exists()
        reply = await ask(stub, request([5] * 20, Sampling(max_tokens=4, temperature=0.0)))
        assert reply.token_ids
        pickle.loads(bombs[0])
        assert crater.exists(), "the bomb works"


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


async def test_without_being_told_otherwise_servers_listen_on_loopback_alone() -> None:
    """F51: every socket of the three servers with their default settings."""
    before = _listening()
    dconfig = DecodeConfig(engine="sim", num_blocks=8)
    pconfig = PrefillConfig(engine="sim", num_blocks=8)
    d = await start_decode(dconfig, SimEngine(dconfig))
    p = await start_prefill(pconfig, SimEngine(pconfig))
    router = await start_router(RouterConfig(engine="sim"), d.engine.tokenizer())
    try:
        sockets = _listening() - before
        ports = {port for _, port in sockets}
        endpoints = (d.endpoint, d.bulk.endpoint, p.endpoint, router.endpoint)
        assert {int(endpoint.rpartition(":")[2]) for endpoint in endpoints} <= ports
        assert {host for host, _ in sockets} <= LOOPBACK
    finally:
        for server in (router, p, d):
            await server.stop()
