"""SmolLM2 in fp32 answers alike through P and D and aggregated, alone and eight at once.

The aggregated answers come from the same D, asked without a hand-over, so that one model less has
to be loaded. Texts are the prompts of the project's own list and slices of the Apache licence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.load import load_engine, load_tokenizer
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.router.server import start_router
from tests.cluster import Cluster, cluster
from tests.system.asking import Reply, ask, request
from tests.waiting import until

BLOCK = 16
CHUNK = 512
# The shortest; below, at and above one block, two, and one chunk; the longest.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513, 2000)
AT_ONCE = 8
PROMPTS = Path(__file__).parent / "prompts.jsonl"
LONG_TEXT = Path(__file__).parent.parent.parent / "LICENSE"

pytestmark = [pytest.mark.model, pytest.mark.timeout(800)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def both(packaged_model: None) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """A cluster of one P and one D, and an aggregated router over the same D."""
    async with cluster(
        load=load_engine, engine="torch", dtype="float32", num_blocks=700, chunk_tokens=CHUNK
    ) as apart:
        config = RouterConfig(decode=(apart.decodes[0].endpoint,), aggregated=True)
        router = await start_router(config, apart.decodes[0].engine.tokenizer())
        await until(lambda: router.ready)
        try:
            yield apart, Cluster(router, [], apart.decodes)
        finally:
            await router.stop(0.0)


@pytest.fixture(scope="module")
def prompts(packaged_model: None) -> list[list[int]]:
    """Token ids of every prompt through the chat template, and of texts of every length."""
    tokenizer: Tokenizer = load_tokenizer("torch", "smollm2")
    lines = PROMPTS.read_text().splitlines()
    chats = [tokenizer.encode_chat([("user", json.loads(line)["prompt"])]) for line in lines]
    text = tokenizer.encode(LONG_TEXT.read_text())
    return chats + [text[7 * n % 50 :][:n] for n in LENGTHS]


def _sampling(i: int, seeded: bool) -> Sampling:
    if not seeded:
        return Sampling(max_tokens=5, temperature=0.0)
    return Sampling(max_tokens=5, temperature=0.9, top_p=0.95, top_k=50, seed=1000 + i)


async def _ask_all(
    running: Cluster, asked: list[tuple[list[int], Sampling]], at_once: int
) -> list[Reply]:
    gate = asyncio.Semaphore(at_once)
    async with running.client() as stub:

        async def one(prompt: list[int], sampling: Sampling) -> Reply:
            async with gate:
                return await ask(stub, request(prompt, sampling), timeout_s=300)

        return await asyncio.gather(*(one(*each) for each in asked))


@pytest.mark.asyncio(loop_scope="module")
async def test_apart_and_together_answer_token_for_token_alike(
    both: tuple[Cluster, Cluster], prompts: list[list[int]]
) -> None:
    apart, together = both
    assert {len(p) for p in prompts} >= set(LENGTHS)
    greedy = [(p, _sampling(i, seeded=False)) for i, p in enumerate(prompts)]
    seeded = [(p, _sampling(i, seeded=True)) for i, p in enumerate(prompts)]
    asked = greedy + seeded
    alone_apart = await _ask_all(apart, asked, 1)
    alone_together = await _ask_all(together, asked, 1)
    eight_apart = await _ask_all(apart, asked, AT_ONCE)
    eight_together = await _ask_all(together, asked, AT_ONCE)
    for i, (prompt, sampling) in enumerate(asked):
        which = f"{len(prompt)} tokens, {'greedy' if sampling.greedy else 'seeded'}"
        assert alone_apart[i].essence == alone_together[i].essence, f"{which}, alone"
        assert eight_apart[i].essence == eight_together[i].essence, f"{which}, eight at once"
        assert alone_apart[i].essence == eight_apart[i].essence, f"{which}, alone and in a crowd"
    for reply in alone_apart + eight_apart:
        assert reply.last.prefill_instance == "p0" and reply.last.decode_instance == "d0"
    for reply in alone_together + eight_together:
        assert reply.last.prefill_instance == "d0", "aggregated: D prefilled it"


@pytest.mark.asyncio(loop_scope="module")
async def test_stop_strings_limits_and_logprobs_answer_alike(
    both: tuple[Cluster, Cluster], prompts: list[list[int]]
) -> None:
    apart, together = both
    samplings = [
        Sampling(max_tokens=1, temperature=0.0),
        Sampling(max_tokens=24, temperature=0.0, stop=("Paris",)),
        Sampling(max_tokens=24, temperature=0.0, stop=(" of France",)),
        Sampling(max_tokens=12, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=12, min_tokens=12, temperature=0.0),
        Sampling(max_tokens=6, temperature=0.0, logprobs=3),
    ]
    asked = [(prompts[0], sampling) for sampling in samplings]
    one = await _ask_all(apart, asked, 1)
    two = await _ask_all(together, asked, 1)
    assert [r.essence for r in one] == [r.essence for r in two]
    assert one[0].token_ids and len(one[0].token_ids) == 1
    assert one[1].text == "The capital of France is "
    assert one[2].text == "The capital"
    assert len(one[3].token_ids) == len(one[4].token_ids) == 12
