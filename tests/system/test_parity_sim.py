"""Prefill and decode apart answer as one aggregated server does, and as the sim rule says."""

from __future__ import annotations

import asyncio

import pytest

from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.config import DecodeConfig
from tests.cluster import SIM, Cluster, cluster
from tests.system.asking import Reply, ask, random_request, request

AT_ONCE = 32

pytestmark = pytest.mark.longest


async def _answers(running: Cluster, seeds: range) -> list[Reply]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with running.client() as stub:

        async def one(seed: int) -> Reply:
            prompt, sampling = random_request(seed)
            async with gate:
                return await ask(stub, request(prompt, sampling))

        return await asyncio.gather(*(one(seed) for seed in seeds))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("prompts", [200, pytest.param(1000, marks=pytest.mark.soak)])
async def test_random_prompts_answer_alike_apart_and_together(prompts: int) -> None:
    seeds = range(prompts)
    async with cluster(prefills=1, decodes=1) as apart:
        disaggregated = await _answers(apart, seeds)
    async with cluster(aggregated=True) as together:
        aggregated = await _answers(together, seeds)
    config = DecodeConfig(**SIM)
    for seed, a, b in zip(seeds, disaggregated, aggregated, strict=True):
        assert a.essence == b.essence, f"seed {seed}"
        assert a.token_ids == sim_answer(*random_request(seed), config), f"seed {seed}"


async def test_two_prefills_and_two_decodes_serve_64_requests_at_once() -> None:
    async with cluster(prefills=2, decodes=2) as running:
        async with running.client() as stub:
            asked = [random_request(seed) for seed in range(64)]
            replies = await asyncio.gather(*(ask(stub, request(*one)) for one in asked))
        config = DecodeConfig(**SIM)
        assert [r.token_ids for r in replies] == [sim_answer(*one, config) for one in asked]
        prefills = {reply.last.prefill_instance for reply in replies}
        decodes = {reply.last.decode_instance for reply in replies}
        assert (prefills, decodes) == ({"p0", "p1"}, {"d0", "d1"})


async def test_a_decode_pool_too_small_for_all_lets_later_requests_wait() -> None:
    async with cluster(decode_settings={"num_blocks": 24}) as running:
        async with running.client() as stub:
            asked = [random_request(seed) for seed in range(40)]
            replies = await asyncio.gather(*(ask(stub, request(*one)) for one in asked))
        config = DecodeConfig(**SIM)
        assert [r.token_ids for r in replies] == [sim_answer(*one, config) for one in asked]
