"""The router with real prefill and decode instances on the sim engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import grpc.aio
import pytest

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.cli.cluster import ClusterPlan, LocalCluster
from pd_grpc.client import Answer, AsyncClient, AsyncGeneration, Fault
from pd_grpc.decode.server import start_decode
from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.prefill.server import start_prefill
from pd_grpc.protocol.config import DecodeConfig, EngineConfig, PrefillConfig, RouterConfig
from pd_grpc.protocol.faults import Code, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.cluster import cluster
from tests.router.conftest import until_all_ready
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.longest

PROMPT = list(range(3, 500))
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


def ask(client: AsyncClient, prompt: list[int], max_tokens: int = 12) -> AsyncGeneration:
    return client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)


async def test_of_two_clients_with_one_request_id_at_once_one_is_answered() -> None:
    """F14: the name is the client's, so the second request cannot be told from a repeated one."""
    async with (
        cluster() as running,
        AsyncClient(running.router.endpoint) as one,
        AsyncClient(running.router.endpoint) as other,
    ):
        calls = [
            client.generate(
                token_ids=PROMPT,
                max_tokens=2000,
                temperature=0,
                ignore_eos=True,
                request_id="twin",
            ).collect()
            for client in (one, other)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers = [result for result in results if isinstance(result, Answer)]
        faults = [result for result in results if isinstance(result, Fault)]
        assert len(answers) == len(faults) == 1, results
        assert (faults[0].code, faults[0].reason) == (Code.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST)
        greedy = replace(GREEDY, max_tokens=2000)
        assert answers[0].token_ids == sim_answer(PROMPT, greedy, EngineConfig(engine="sim"))


async def test_sixty_four_requests_at_once_are_spread_and_answered_as_if_alone() -> None:
    async with cluster(2, 2) as running, AsyncClient(running.router.endpoint) as client:
        prompts = [[7 + i] * (5 + 13 * i % 200) for i in range(64)]
        answers = await asyncio.gather(*(ask(client, prompt).collect() for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = sim_answer(prompt, GREEDY, EngineConfig(engine="sim"))
            assert answer.token_ids == expected
        ends = [answer.end for answer in answers if answer.end is not None]
        assert {end.prefill_instance for end in ends} == {"p0", "p1"}
        assert {end.decode_instance for end in ends} == {"d0", "d1"}


@pytest.mark.parametrize("tokens_seen", [0, 1, 5])
async def test_a_client_that_leaves_frees_every_block_at_each_stage(tokens_seen: int) -> None:
    """F33; that every block is back is what the cluster checks at its end."""
    async with (
        cluster(sim_time_scale=10.0) as running,
        AsyncClient(running.router.endpoint) as client,
    ):
        async with ask(client, PROMPT, 2000) as generation:
            await until(lambda: len(running.router.in_flight.running()) == 1)
            seen = 0
            while seen < tokens_seen:
                seen += len((await anext(generation)).token_ids)
        await until(lambda: not running.router.in_flight.running())


async def test_the_stages_of_a_real_answer_lie_within_its_time_to_first_token() -> None:
    async with (
        cluster(sim_time_scale=20.0) as running,
        AsyncClient(running.router.endpoint) as client,
    ):
        await ask(client, PROMPT).collect()
        begun = time.monotonic()
        generation = ask(client, PROMPT)
        await anext(generation)
        to_first_token = (time.monotonic() - begun) * 1000
        end = (await generation.collect()).end
        assert end is not None
        stages = ("route", "queue", "prepare", "compute", "first_token")
        # The router takes the request in after it is sent, and has the token before the client.
        told = sum(end.timings_ms[s] for s in stages)
        assert all(end.timings_ms[s] >= 0.0 for s in stages)
        assert 0.0 < end.timings_ms["compute"] < told
        assert told < to_first_token
        assert end.timings_ms["total"] > told


async def test_an_aggregated_answer_says_that_its_time_went_into_compute() -> None:
    async with (
        cluster(sim_time_scale=20.0, aggregated=True) as running,
        AsyncClient(running.router.endpoint) as client,
    ):
        end = (await ask(client, PROMPT).collect()).end
        assert end is not None
        assert end.timings_ms["compute"] > end.timings_ms["first_token"]


def is_free(pool: BlockPool) -> bool:
    """Whether every block is back."""
    return pool.free == pool.total


# --- another D ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def unlike(*sim_layers: int) -> AsyncIterator[tuple[RouterServer, AsyncClient]]:
    """A router and a P of four layers, with a D for each of these numbers of layers."""
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for i, layers in enumerate(sim_layers):
            config = DecodeConfig(name=f"d{i}", engine="sim", num_blocks=64, sim_layers=layers)
            d = await start_decode(config, SimEngine(config))
            stack.push_async_callback(d.stop)
            servers.append(d)
        pconfig = PrefillConfig(name="p", engine="sim", num_blocks=64, sim_layers=4)
        p = await start_prefill(pconfig, SimEngine(pconfig))
        stack.push_async_callback(p.stop)
        decode = tuple(d.endpoint for d in servers)
        rconfig = RouterConfig(engine="sim", prefill=(p.endpoint,), decode=decode)
        router = await start_router(rconfig, p.engine.tokenizer())
        stack.push_async_callback(router.stop)
        await asyncio.wait_for(until_all_ready(router), LIMIT_S)
        client = await stack.enter_async_context(AsyncClient(router.endpoint))
        yield router, client
        for pool in (p.pool, *(d.pool for d in servers)):
            await until(partial(is_free, pool))
            pool.check()


async def test_a_decode_instance_that_does_not_fit_is_left_for_one_that_does() -> None:
    async with unlike(2, 4) as (router, client):
        for _ in range(4):
            answer = await ask(client, PROMPT[:40]).collect()
            assert answer.end is not None and answer.end.decode_instance == "d1"
            assert answer.token_ids == sim_answer(PROMPT[:40], GREEDY, EngineConfig(engine="sim"))
        await router.in_flight.idle()
        for view in router.discovery.instances:
            loads = (router.routing.prefill_load, router.routing.decode_load)
            assert [load.in_flight(view.endpoint) for load in loads] == [(0, 0), (0, 0)]


async def test_a_layout_that_differs_is_told_with_its_field_when_there_is_no_other() -> None:
    async with unlike(2) as (_, client):
        with pytest.raises(Fault) as raised:
            await ask(client, PROMPT[:40]).collect()
    assert (raised.value.code, raised.value.reason) == (Code.UNAVAILABLE, Reason.LAYOUT_MISMATCH)
    assert "layers" in raised.value.metadata["field"]


# --- processes that die ---------------------------------------------------------------------------


async def until_nothing_is_held(endpoint: str) -> None:
    """Wait until an instance has no transfer and all its blocks; a step under way ends first."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        held = True
        while held:
            info = await admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=60)
            states = {count.state for count in info.server.blocks}
            unheld = {admin_pb2.BLOCK_STATE_FREE, admin_pb2.BLOCK_STATE_CACHED}
            held = bool(info.server.transfers) or not states <= unheld


@contextlib.asynccontextmanager
async def until_computing(endpoint: str) -> AsyncIterator[None]:
    """Leaves the block once P computes what was asked for within it."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        changes = admin.WatchTransfers(admin_pb2.WatchTransfersRequest(), timeout=60)
        await changes.initial_metadata()
        yield
        async for change in changes:
            if change.transfer.state == types_pb2.TRANSFER_STATE_COMPUTING:
                break
        changes.cancel()


@pytest.mark.parametrize(
    ("victim", "survivor", "tokens_seen", "reason"),
    [
        ("prefill-0", "decode-0", 0, Reason.PREFILL_LOST),
        ("decode-0", "prefill-0", 0, Reason.DECODE_LOST),
        ("decode-0", "prefill-0", 3, Reason.DECODE_LOST),
    ],
)
async def test_a_killed_server_is_told_within_two_seconds_and_the_survivors_blocks_return(
    victim: str, survivor: str, tokens_seen: int, reason: Reason
) -> None:
    flags = ("--sim-time-scale", "20", "--chunk-tokens", "64", "--max-model-len", "4096")
    plan = ClusterPlan(engine="sim", flags=flags)
    running = await asyncio.to_thread(LocalCluster(plan).__enter__)
    endpoints = {i.name: i.endpoint for i in running.instances}
    try:
        async with AsyncClient(running.router_endpoint) as client:
            async with until_computing(endpoints["prefill-0"]):
                generation = ask(client, [5] * 2000, 500)
            seen = 0
            while seen < tokens_seen:
                seen += len((await anext(generation)).token_ids)
            reading = asyncio.create_task(generation.collect())
            os.kill(running.processes[victim], signal.SIGKILL)
            with pytest.raises(Fault) as raised:
                await asyncio.wait_for(reading, LIMIT_S)
        assert (raised.value.code, raised.value.reason) == (Code.UNAVAILABLE, reason)
        await asyncio.wait_for(until_nothing_is_held(endpoints[survivor]), LIMIT_S)
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)
