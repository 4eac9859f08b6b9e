"""S13: an engine step or a KV sender that hangs turns readiness off within the set time and fails
what is in flight with the reason; readiness comes back when it moves, and is off until warm."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_grpc.engine.base import PrefillChunk, Sampled
from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from tests.prefill.cluster import Outcome, answer_to, request_to, running

PREFILL, DECODE = "pd_grpc.v1.PrefillService", "pd_grpc.v1.DecodeService"
LIMIT_S = 1.0
LATE_S = 30.0
STUCK: dict[str, Any] = {"no_progress_s": LIMIT_S, "kv_progress_s": LIMIT_S / 2}
STATUS = health_pb2.HealthCheckResponse


class Gated(SimEngine):
    """Goes on only while its gates are open."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.warm, self.gate = threading.Event(), threading.Event()
        for gate in (self.warm, self.gate):
            gate.set()

    def warm_up(self) -> None:
        assert self.warm.wait(120)

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        assert self.gate.wait(120)
        return super().prefill(batch, on_layer)

    def decode(self, batch: Any) -> list[Sampled]:
        assert self.gate.wait(120)
        return super().decode(batch)


async def _becomes(endpoint: str, service: str, status: int, limit_s: float) -> None:
    """Watch a health service until it says so."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            request, timeout=limit_s, wait_for_ready=True
        )
        async for answer in watch:
            if answer.status == status:
                watch.cancel()
                return


def _failed_with(outcome: Outcome, reason: Reason) -> None:
    assert isinstance(outcome.fault, Fault), outcome.fault
    assert (outcome.fault.code, outcome.fault.reason) == (Code.UNAVAILABLE, reason)


async def test_a_step_of_d_that_hangs_is_seen_and_its_end_as_well() -> None:
    """S13"""
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode(engine=Gated, **STUCK)
        assert isinstance(d.engine, Gated)
        await _becomes(d.endpoint, DECODE, STATUS.SERVING, LATE_S)
        d.engine.gate.clear()
        asked = time.monotonic()
        leg = asyncio.create_task(cluster.run(p, d, request_to(d)))
        await _becomes(d.endpoint, DECODE, STATUS.NOT_SERVING, LIMIT_S + LATE_S)
        assert time.monotonic() - asked > LIMIT_S / 2, "it was given its time"
        _failed_with((await leg)[1], Reason.ENGINE_STUCK)
        refused = await cluster.run_generate(d, request_to(d, random_seed=2))
        _failed_with(refused, Reason.ENGINE_STUCK)
        d.engine.gate.set()
        await _becomes(d.endpoint, DECODE, STATUS.SERVING, LATE_S)
        again = request_to(d, random_seed=3)
        assert (await cluster.run(p, d, again))[1].tokens == answer_to(again)


async def test_a_step_of_p_that_hangs_is_seen_and_its_end_as_well() -> None:
    """S13"""
    async with running() as cluster:
        p, d = await cluster.prefill(engine=Gated, **STUCK), await cluster.decode()
        assert isinstance(p.engine, Gated)
        p.engine.gate.clear()
        leg = asyncio.create_task(cluster.run(p, d, request_to(d)))
        await _becomes(p.endpoint, PREFILL, STATUS.NOT_SERVING, LIMIT_S + LATE_S)
        for outcome in await leg:
            _failed_with(outcome, Reason.ENGINE_STUCK)
        p.engine.gate.set()
        await _becomes(p.endpoint, PREFILL, STATUS.SERVING, LATE_S)
        again = request_to(d, random_seed=3)
        assert (await cluster.run(p, d, again))[1].tokens == answer_to(again)


async def test_a_sender_that_hangs_is_seen_and_that_it_moves_as_well() -> None:
    """S13"""
    async with running() as cluster:
        p = await cluster.prefill(**STUCK)
        d = await cluster.decode(kv_progress_s=LIMIT_S / 2)
        go_on = threading.Event()
        p.bulk._loop.call_soon_threadsafe(go_on.wait, 120)
        try:
            leg = asyncio.create_task(cluster.run(p, d, request_to(d)))
            await _becomes(p.endpoint, PREFILL, STATUS.NOT_SERVING, LIMIT_S + LATE_S)
            for outcome in await leg:
                _failed_with(outcome, Reason.SENDER_STUCK)
        finally:
            go_on.set()
        await _becomes(p.endpoint, PREFILL, STATUS.SERVING, LATE_S)
        again = request_to(d, random_seed=3)
        assert (await cluster.run(p, d, again))[1].tokens == answer_to(again)


async def test_an_instance_without_work_is_ready_however_long_nothing_moves() -> None:
    """S13: and before its first batch."""
    async with running() as cluster:
        brief: dict[str, Any] = {"no_progress_s": 0.1, "kv_progress_s": 0.05}
        p, d = await cluster.prefill(**brief), await cluster.decode(**brief)
        for server, service in ((p, PREFILL), (d, DECODE)):
            await _becomes(server.endpoint, service, STATUS.SERVING, LATE_S)
        for server, service in ((p, PREFILL), (d, DECODE)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await _becomes(server.endpoint, service, STATUS.NOT_SERVING, 0.3)
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_nobody_is_ready_before_the_model_is_warm() -> None:
    """S13"""
    made: list[Gated] = []

    class Cold(Gated):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self.warm.clear()
            made.append(self)

    async with running() as cluster:
        for start, service in ((cluster.prefill, PREFILL), (cluster.decode, DECODE)):
            port = _free_port()
            starting = asyncio.create_task(start(engine=Cold, port=port))
            await _becomes(f"127.0.0.1:{port}", service, STATUS.NOT_SERVING, LATE_S)
            await _becomes(f"127.0.0.1:{port}", "", STATUS.SERVING, LATE_S)
            assert not starting.done()
            made[-1].warm.set()
            await _becomes(f"127.0.0.1:{port}", service, STATUS.SERVING, LATE_S)
            await starting


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
