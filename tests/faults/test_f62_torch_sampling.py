"""F62: whatever the sampler counts, it counts the same in P's first token and D's later ones, in
what is preempted and in an answer that goes on elsewhere, with a real model in fp32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.engine.base import Engine
from pd_grpc.engine.load import load_engine
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling
from tests.cluster import Cluster, cluster
from tests.faults.test_f29_torch_preemption import preemptions
from tests.system.asking import Reply, ask, request

pytest.importorskip("transformers")

torch_models = pytest.importorskip("tests.engine.torch_models")

Load = Callable[[EngineConfig], Engine]
Asked = list[tuple[list[int], Sampling, list[int]]]

TOKENS = 24
PROMPTS = [[(7 * i * i + n) % 256 for i in range(n)] for n in (16, 20, 40)]
PLAIN = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
SEEDED = replace(PLAIN, temperature=0.9, seed=5)
ALL: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.3,
    "logit_bias": ((60, 3.0), (61, -100.0)),
    "min_p": 0.02,
    "logprobs": 3,
}
SAMPLINGS = [
    replace(PLAIN, repetition_penalty=1.3),
    replace(PLAIN, repetition_penalty=0.4),
    replace(PLAIN, presence_penalty=2.0, frequency_penalty=0.5),
    replace(PLAIN, frequency_penalty=-2.0, logprobs=0),
    replace(PLAIN, logit_bias=((70, 4.0), (71, 4.0)), logprobs=2),
    replace(SEEDED, min_p=0.2),
    replace(SEEDED, top_k=40, top_p=0.9, **ALL),
    replace(SEEDED, min_tokens=8, stop_token_ids=(60, 62, 64), **ALL),
]
TORCH: dict[str, Any] = {"engine": "torch", "dtype": "float32", "block_size": 8, "threads": 1}
BLOCKS_EACH = 8
ROOMY = len(PROMPTS) * len(SAMPLINGS) * BLOCKS_EACH
TIGHT = ROOMY // 4


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder: Path = torch_models.save_model(
        tmp_path_factory.mktemp("tiny"), torch_models.CONFIGS["llama"]()
    )

    def tiny(config: EngineConfig) -> Engine:
        return load_engine(config.model_copy(update={"model": str(folder)}))

    return tiny


async def answers(running: Cluster, asked: Asked) -> list[Reply]:
    async def one(prompt: list[int], sampling: Sampling, given: list[int]) -> Reply:
        message = request(prompt, sampling)
        message.generated_token_ids.extend(given)
        return await ask(stub, message)

    async with running.client() as stub:
        return await asyncio.gather(*(one(*each) for each in asked))


def continued(asked: Asked, replies: list[Reply]) -> Asked:
    """The same requests of clients that have the beginning of the answer already."""
    return [
        (prompt, sampling, reply.token_ids[:given])
        for (prompt, sampling, _), reply in zip(asked, replies, strict=True)
        for given in (1, 9)
        if given < len(reply.token_ids)
    ]


def assert_logprobs_alike(one: Reply, other: Reply) -> None:
    """The same tokens, and of the same likelihood but for the last bits."""
    for here, there in zip(one.logprobs, other.logprobs, strict=True):
        assert here.chosen.token_id == there.chosen.token_id
        assert [t.token_id for t in here.top] == [t.token_id for t in there.top]
        assert here.chosen.logprob == pytest.approx(there.chosen.logprob, abs=1e-4)
        assert [t.logprob for t in here.top] == pytest.approx(
            [t.logprob for t in there.top], abs=1e-4
        )


async def test_penalties_and_biases_answer_alike_in_all_ways(load: Load) -> None:
    asked: Asked = [(prompt, sampling, []) for prompt in PROMPTS for sampling in SAMPLINGS]
    plain: Asked = [(prompt, base, []) for prompt in PROMPTS for base in (PLAIN, SEEDED)]
    async with cluster(load=load, aggregated=True, num_blocks=ROOMY, **TORCH) as together:
        meant = await answers(together, asked)
        unchanged = await answers(together, plain)
        rest_meant = await answers(together, continued(asked, meant))

    tight = {"num_blocks": TIGHT}
    async with cluster(load=load, num_blocks=ROOMY, decode_settings=tight, **TORCH) as apart:
        seen = preemptions(apart.decodes[0])
        said = await answers(apart, asked)
        rest_said = await answers(apart, continued(asked, meant))

    assert len(seen) >= 2, "the pool was large enough for all, which shows nothing"
    for (_, sampling, _), one, two in zip(asked, meant, said, strict=True):
        assert two.essence == one.essence, sampling
        assert len(two.logprobs) == (len(two.token_ids) if sampling.logprobs is not None else 0)
        assert_logprobs_alike(two, one)
    given_up = continued(asked, meant)
    whole = {(tuple(p), s): r.token_ids for (p, s, _), r in zip(asked, meant, strict=True)}
    for (prompt, sampling, given), one, two in zip(given_up, rest_meant, rest_said, strict=True):
        assert one.token_ids == whole[tuple(prompt), sampling][len(given) :], sampling
        assert two.essence == one.essence, sampling
        assert_logprobs_alike(two, one)
    different = {tuple(reply.token_ids) for reply in meant + unchanged}
    assert len(different) > 0.9 * len(meant + unchanged), "the changes must matter"
