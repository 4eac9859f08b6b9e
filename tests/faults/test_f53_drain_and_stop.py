"""F53: a drain refuses what is new, serves what was granted and finishes what runs, until its time
is over; a stop waits for the clean-up of our own handlers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_grpc.decode.server import start_decode
from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import DecodeConfig, RouterConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, types_pb2
from tests.cluster import cluster
from tests.decode.wire import CALL_S, SIM, GatedEngine, Wire, fault_of, tokens_of, wire
from tests.prefill.cluster import answer_to, request_to, running
from tests.system.asking import ask, request
from tests.waiting import until

SOON_S = 20.0
LONG_S = 120.0
"""A drain that is cut short by a second one, once what was to be finished is."""


async def _drain(endpoint: str, deadline_s: float) -> int:
    """As an operator does it; returns what is in flight."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        asked = admin_pb2.DrainRequest(deadline=duration(deadline_s))
        return int((await admin.Drain(asked, timeout=CALL_S)).transfers)


async def _ready(endpoint: str, service: str) -> bool:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        asked = health_pb2.HealthCheckRequest(service=f"pd_grpc.v1.{service}")
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=CALL_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _left(fault: object) -> None:
    assert isinstance(fault, Fault), fault
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.DRAINING)


async def test_a_draining_d_serves_what_it_granted_and_what_it_took_in() -> None:
    """F53: the client of a grant may come later, and a request of D's own that waits for blocks has
    nobody else to serve it."""
    async with wire(num_blocks=10) as d:
        p = await d.prefill()
        granted, waiting = d.request(), d.request(prompt=list(range(300, 333)))
        grant = await p.allocate(granted)
        local = asyncio.create_task(tokens_of(d.generate(waiting, local=True)))
        await until(lambda: len(d.server.view.transfers()) == 2)
        states = {transfer.state for transfer in d.server.view.transfers()}
        assert states == {types_pb2.TRANSFER_STATE_RESERVED, types_pb2.TRANSFER_STATE_WAITING}
        assert await _drain(d.server.endpoint, LONG_S) == 2
        assert not await _ready(d.server.endpoint, "DecodeService")
        _left(await fault_of(p.allocate(d.request())))
        _left(await fault_of(d.generate(d.request())))
        _left(await fault_of(d.generate(d.request(), local=True)))
        client = asyncio.create_task(tokens_of(d.generate(granted)))
        token, chunks = p.compute(granted)
        await p.first_token(granted, grant.grant_id, token)
        await p.send_kv(granted, grant, chunks)
        assert await client == d.answer(granted)
        assert await local == d.answer(waiting)
        await asyncio.wait_for(d.server.drained(), SOON_S)


async def test_what_d_has_not_finished_in_time_fails_with_the_reason() -> None:
    """F53: and the drain is over, though the engine is in the middle of a step."""
    async with wire(GatedEngine) as d:
        engine = d.server.engine
        assert isinstance(engine, GatedEngine)
        engine.gate.clear()
        p = await d.prefill()
        running_, reserved = d.request(), d.request()
        calls = [asyncio.create_task(fault_of(d.generate(running_, local=True)))]
        await asyncio.to_thread(engine.entered.wait, CALL_S)
        await p.allocate(reserved)
        calls.append(asyncio.create_task(fault_of(d.generate(reserved))))
        await until(lambda: all(t.client for t in d.server.machine.ledger.transfers.values()))
        began = time.monotonic()
        assert await _drain(d.server.endpoint, 0.3) == 2
        for fault in await asyncio.gather(*calls):
            _left(fault)
        assert (await p.told_of(reserved)).status.code == Code.UNAVAILABLE
        await asyncio.wait_for(d.server.drained(), SOON_S)
        assert 0.3 <= time.monotonic() - began < 0.3 + SOON_S
        engine.gate.set()


async def test_a_draining_p_hands_over_what_it_has_and_fails_the_rest_in_time() -> None:
    """F53"""
    async with running() as servers:
        p, d = await servers.prefill(), await servers.decode()
        held = p.pool.reserve(p.pool.free, owner="the test")
        fits, never = request_to(d, tokens=40), request_to(d, tokens=200)
        legs = [asyncio.create_task(servers.run(p, d, fits))]
        prepared = types_pb2.TRANSFER_STATE_PREPARED
        await until(lambda: [t.state for t in p.view.transfers()] == [prepared])
        taken = d.pool.reserve(d.pool.free, owner="the test")
        legs.append(asyncio.create_task(servers.run(p, d, never)))
        await until(lambda: p.machine.placement.pool.in_flight == 1)
        await _drain(p.endpoint, LONG_S)
        assert not await _ready(p.endpoint, "PrefillService")
        _left((await servers.run_prefill(p, request_to(d, random_seed=3))).fault)
        held.release()
        p.runtime.wake()
        allocating = types_pb2.TRANSFER_STATE_ALLOCATING
        await until(lambda: [t.state for t in p.view.transfers()] == [allocating])
        await _drain(p.endpoint, 0.3)
        for outcome in await legs[1]:
            _left(outcome.fault)
        await asyncio.wait_for(p.drained(), SOON_S)
        taken.release()  # D needs more blocks to go on with what was handed over
        d.runtime.wake()
        prefill, generate = await legs[0]
        assert (prefill.fault, generate.tokens) == (None, answer_to(fits))


async def test_a_draining_router_finishes_its_streams_and_fails_the_rest_in_time() -> None:
    """F53"""
    greedy = Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)
    endless = Sampling(max_tokens=100_000, temperature=0.0, ignore_eos=True)
    async with (
        cluster(sim_time_scale=0.5, num_blocks=8000) as servers,
        rpc.aio_channel(servers.router.endpoint, RouterConfig(), RouterConfig()) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        short = asyncio.create_task(ask(stub, request([5] * 20, greedy)))
        long = asyncio.create_task(fault_of(stub.Generate(request([6] * 20, endless))))
        await until(lambda: len(servers.router.in_flight.running()) == 2)
        assert await _drain(servers.router.endpoint, LONG_S) == 2
        assert not await _ready(servers.router.endpoint, "InferenceService")
        _left(await fault_of(stub.Generate(request([7] * 20, greedy))))
        assert len((await short).token_ids) == 100
        assert await _drain(servers.router.endpoint, 0.3) == 1
        _left(await long)
        await asyncio.wait_for(servers.router.drained(), SOON_S)


async def test_a_stop_returns_when_aborted_handlers_have_cleaned_up() -> None:
    """F53: a client that leaves in RESERVED, and a stop in the same moment."""
    async with wire() as real:
        config = DecodeConfig(**SIM)
        server = await start_decode(config, SimEngine(config))
        async with grpc.aio.insecure_channel(server.endpoint) as channel:
            d = Wire(server, channel, config)
            p = await d.prefill()
            requests = [d.request() for _ in range(4)]
            calls: list[Any] = [d.generate(each) for each in requests]
            for each in requests:
                await p.allocate(each)
            await until(lambda: all(t.client for t in server.machine.ledger.transfers.values()))
            for call in calls:
                call.cancel()
            await server.stop()
            assert server.control.handlers.running == 0
            assert server.machine.ledger.transfers == {}
            server.pool.check()
            assert server.pool.free == server.pool.total
            await p.close()
        assert real.server.control.ready, "another server of this process goes on"
