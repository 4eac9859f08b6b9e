"""SmolLM2 in fp32 answers alike through P and D and aggregated, alone and eight at once.

The aggregated answers come from the same D, asked without a hand-over. P and D compute with the
same weights in memory, each over a pool of its own. Texts are the prompts of the project's own list
and slices of the Apache licence.

`make test` compares ten prompts apart in a crowd with together and alone, and four in the two ways
between; `make parity` asks every prompt both greedily and seeded, in all four.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.router.server import start_router
from pd_grpc.v1 import layout_pb2
from tests.cluster import Cluster, cluster
from tests.engine.torch_models import another_pool
from tests.system.asking import Reply, ask, request
from tests.waiting import until

CHUNK = 128
# The shortest; below, at and above one block, and two.
SHORT = (1, 2, 15, 16, 17, 31, 32, 33)
# Below, at and above one chunk; the longest.
LONG = (127, 128, 129, 2000)
# Above some chunks, and below, at and above some more.
LONGER = (257, 511, 512, 513)
AT_ONCE = 8
PROMPTS = Path(__file__).parent / "prompts.jsonl"
LONG_TEXT = Path(__file__).parent.parent.parent / "LICENSE"

Asked = list[tuple[list[int], Sampling]]

pytestmark = [pytest.mark.model, pytest.mark.longest, pytest.mark.timeout(800)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def both(smollm2: TorchEngine) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """A cluster of one P and one D, and an aggregated router over the same D. They keep nothing of
    a prompt, so that each answer is computed anew."""
    async with cluster(
        load=another_pool(smollm2),
        engine="torch",
        dtype="float32",
        num_blocks=700,
        chunk_tokens=CHUNK,
        prefix_cache=0.0,
    ) as apart:
        config = RouterConfig(decode=(apart.decodes[0].endpoint,), aggregated=True)
        router = await start_router(config, apart.decodes[0].engine.tokenizer())
        await until(lambda: router.ready)
        try:
            yield apart, Cluster(router, [], apart.decodes)
        finally:
            await router.stop(0.0)


@pytest.fixture(scope="module")
def chats(smollm2_tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt of the list, through the chat template."""
    lines = PROMPTS.read_text().splitlines()
    return [smollm2_tokenizer.encode_chat([("user", json.loads(line)["prompt"])]) for line in lines]


@pytest.fixture(scope="module")
def texts(smollm2_tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Token ids of a text of every length."""
    text = smollm2_tokenizer.encode(LONG_TEXT.read_text())
    return {n: text[7 * n % 50 :][:n] for n in SHORT + LONG + LONGER}


def greedy(prompts: list[list[int]]) -> Asked:
    """Each prompt asked for its likeliest answer."""
    return [(prompt, Sampling(max_tokens=5, temperature=0.0)) for prompt in prompts]


def seeded(prompts: list[list[int]]) -> Asked:
    """Each prompt asked for an answer drawn with a seed of its own."""
    return [
        (prompt, Sampling(max_tokens=5, temperature=0.9, top_p=0.95, top_k=50, seed=1000 + i))
        for i, prompt in enumerate(prompts)
    ]


async def _ask_all(running: Cluster, asked: Asked, at_once: int) -> list[Reply]:
    gate = asyncio.Semaphore(at_once)
    async with running.client() as stub:

        async def one(prompt: list[int], sampling: Sampling) -> Reply:
            async with gate:
                return await ask(stub, request(prompt, sampling), timeout_s=300)

        return await asyncio.gather(*(one(*each) for each in asked))


async def ask_apart(clusters: tuple[Cluster, Cluster], asked: Asked, at_once: int) -> list[Reply]:
    """The answers through P and D."""
    replies = await _ask_all(clusters[0], asked, at_once)
    for reply in replies:
        assert (reply.last.prefill_instance, reply.last.decode_instance) == ("p0", "d0")
    return replies


async def ask_together(
    clusters: tuple[Cluster, Cluster], asked: Asked, at_once: int
) -> list[Reply]:
    """The answers of D alone."""
    replies = await _ask_all(clusters[1], asked, at_once)
    for reply in replies:
        assert reply.last.prefill_instance == "d0", "aggregated: D prefilled it"
    return replies


def assert_alike(asked: Asked, *answers: list[Reply]) -> None:
    """Every prompt has the same tokens, text, finish reason and usage in all `answers`."""
    for i, (prompt, sampling) in enumerate(asked):
        which = f"{len(prompt)} tokens, {'greedy' if sampling.greedy else 'seeded'}"
        for others in answers[1:]:
            assert others[i].essence == answers[0][i].essence, which


async def _assert_alike_in_all_ways(clusters: tuple[Cluster, Cluster], asked: Asked) -> None:
    assert_alike(
        asked,
        await ask_together(clusters, asked, 1),
        await ask_apart(clusters, asked, 1),
        await ask_together(clusters, asked, AT_ONCE),
        await ask_apart(clusters, asked, AT_ONCE),
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_apart_and_in_a_crowd_the_answer_is_that_of_one_server_asked_alone(
    both: tuple[Cluster, Cluster], chats: list[list[int]], texts: dict[int, list[int]]
) -> None:
    asked = greedy([*chats[::10], texts[257]]) + seeded([*chats[5::10], texts[129]])
    alone = await ask_together(both, asked, 1)
    assert_alike(asked, alone, await ask_apart(both, asked, AT_ONCE))


@pytest.mark.asyncio(loop_scope="module")
async def test_apart_or_together_alone_or_in_a_crowd_the_answer_is_the_same(
    both: tuple[Cluster, Cluster], chats: list[list[int]], texts: dict[int, list[int]]
) -> None:
    prompts = [*(texts[n] for n in (1, 16, 17)), chats[0]]
    await _assert_alike_in_all_ways(both, greedy(prompts) + seeded(prompts))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_prompt_greedy_and_seeded_has_the_same_answer_in_all_four_ways(
    both: tuple[Cluster, Cluster], chats: list[list[int]], texts: dict[int, list[int]]
) -> None:
    prompts = chats + list(texts.values())
    await _assert_alike_in_all_ways(both, greedy(prompts) + seeded(prompts))


@pytest.mark.asyncio(loop_scope="module")
async def test_stop_strings_limits_and_logprobs_answer_alike(
    both: tuple[Cluster, Cluster], chats: list[list[int]]
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
    asked = [(chats[0], sampling) for sampling in samplings]
    one = await _ask_all(apart, asked, 1)
    two = await _ask_all(together, asked, 1)
    assert [r.essence for r in one] == [r.essence for r in two]
    assert one[0].token_ids and len(one[0].token_ids) == 1
    assert one[1].text == "The capital of France is "
    assert one[2].text == "The capital"
    assert len(one[3].token_ids) == len(one[4].token_ids) == 12


@pytest.mark.asyncio(loop_scope="module")
async def test_whatever_is_found_in_a_prefix_cache_the_answer_is_the_same(
    both: tuple[Cluster, Cluster], smollm2: TorchEngine, texts: dict[int, list[int]]
) -> None:
    """Of a prompt of eleven blocks nothing, part, all but one token, all, and more, through P and D
    and by D alone."""
    base = texts[LONG[-1]][: 11 * 16]
    prompts = [base, base[1:60], [*base[:90], *base[:30]], base[:-1], base, [*base, 42]]
    asked = greedy(prompts) + seeded(prompts)
    meant = await ask_together(both, asked, 1)
    for aggregated in (False, True):
        async with cluster(
            load=another_pool(smollm2),
            engine="torch",
            dtype="float32",
            num_blocks=100,
            chunk_tokens=CHUNK,
            aggregated=aggregated,
        ) as kept:
            replies = await _ask_all(kept, asked, 1)
        assert_alike(asked, meant, replies)
        spared = [reply.last.usage.cached_tokens for reply in replies]
        assert spared == [0, 0, 80, 160, 160, 176, 160, 48, 112, 160, 160, 176]


async def test_over_shared_memory_the_answer_is_that_of_one_server(
    smollm2: TorchEngine, chats: list[list[int]], texts: dict[int, list[int]]
) -> None:
    async with cluster(
        load=another_pool(smollm2),
        engine="torch",
        dtype="float32",
        num_blocks=100,
        chunk_tokens=CHUNK,
        transports=("shm", "inline"),
        decode_settings={"audit_every": 1},
    ) as apart:
        asked = greedy([texts[17], texts[129], chats[0]]) + seeded([texts[33]])
        replies = await _ask_all(apart, asked, AT_ONCE)
        (session,) = apart.prefills[0].machine.conversations.all()
        assert session.welcome.transport == layout_pb2.TRANSPORT_SHM
        config = RouterConfig(decode=(apart.decodes[0].endpoint,), aggregated=True)
        router = await start_router(config, apart.decodes[0].engine.tokenizer())
        await until(lambda: router.ready)
        try:
            together = Cluster(router, [], apart.decodes)
            assert_alike(asked, await _ask_all(together, asked, 1), replies)
        finally:
            await router.stop(0.0)
