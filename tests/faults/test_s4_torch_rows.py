"""S4: a request of which a real model makes no numbers fails alone, on P and on D, while those
beside it in the same steps get their answers; and what it leaves behind fails nobody for good."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("transformers")

import torch

from pd_grpc.engine.base import Engine
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from tests.cluster import cluster
from tests.engine.torch_models import (
    CONFIGS,
    Request,
    decode,
    load_for,
    load_tiny,
    prefill,
    save_model,
)
from tests.system.asking import ask, request

POISON = 77
"""The model's embedding of this token is no number."""
TOKENS = 24
PLAIN = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logit_bias=((POISON, -100),))
GOOD = [
    ([(7 * i * i + n) % 70 for i in range(n)], replace(PLAIN, temperature=0.6 * (n % 2), seed=n))
    for n in (5, 16, 31, 40, 90)
]
BAD_PROMPT = ([5] * 20 + [POISON] + [6] * 9, PLAIN)
BAD_OUTPUT = ([9] * 12, replace(PLAIN, logit_bias=((POISON, 100),)))
"""Its first token is the poison, and what follows that is no number."""

TORCH: dict[str, Any] = {
    "engine": "torch",
    "dtype": "float32",
    "block_size": 8,
    "chunk_tokens": 128,
    "threads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), CONFIGS["llama"]())


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """The good answers, of an engine that serves one request after another."""
    engine = load_tiny(folder, threads=1)
    answers = []
    for prompt, sampling in GOOD:
        one = Request(prompt, range(32), sampling)
        prefill(engine, [one], chunk_tokens=512)
        decode(engine, [one])
        answers.append(one.tokens)
    return answers


def is_no_numbers(end: object) -> bool:
    """Whether a request failed because no numbers came of it."""
    fault = rpc.read_error(end) if isinstance(end, grpc.aio.AioRpcError) else None
    return (
        isinstance(fault, Fault)
        and fault.reason is Reason.ENGINE_ERROR
        and "not finite" in fault.message
    )


@pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "apart"])
async def test_what_a_model_makes_no_numbers_of_fails_alone(
    folder: Path, alone: list[list[int]], aggregated: bool
) -> None:
    def load(config: EngineConfig) -> Engine:
        engine = load_for(config, folder)
        with torch.inference_mode():
            engine._model.get_input_embeddings().weight[POISON] = torch.nan
        return engine

    async with cluster(load=load, aggregated=aggregated, **TORCH) as running:
        async with running.client() as stub:
            asked = [*GOOD[:3], BAD_PROMPT, BAD_OUTPUT, *GOOD[3:]]
            answers = await asyncio.gather(
                *(ask(stub, request(*each)) for each in asked), return_exceptions=True
            )
        for failed in (answers.pop(3), answers.pop(3)):
            assert is_no_numbers(failed)
        assert [getattr(answer, "token_ids", answer) for answer in answers] == alone


@pytest.mark.parametrize("where", ["aggregated", "on D", "on P", "on both"])
async def test_kv_that_became_no_numbers_is_found_by_one_request_of_each_instance(
    folder: Path, alone: list[list[int]], where: str
) -> None:
    """Every block of a pool is spoilt while nobody uses it: whoever finds one fails, and with it
    what it found is forgotten. Where both pools are spoilt P's own fails one, and only what it
    computes then meets what is left on D."""
    asked, answer, failing = GOOD[-1], alone[-1], 2 if where == "on both" else 1
    engines: dict[str, TorchEngine] = {}

    def load(config: EngineConfig) -> Engine:
        engine = engines[type(config).__name__] = load_for(config, folder)
        return engine

    async with (
        cluster(load=load, aggregated=where == "aggregated", **TORCH) as running,
        running.client() as stub,
    ):

        async def tried() -> object:
            (end,) = await asyncio.gather(ask(stub, request(*asked)), return_exceptions=True)
            return getattr(end, "token_ids", end)

        assert await tried() == answer
        await running.settled()
        for cache in running.caches():
            assert len(cache) >= len(asked[0]) // TORCH["block_size"]
        spoilt = {"on P": ["PrefillConfig"], "on both": [*engines]}.get(where, ["DecodeConfig"])
        for name in spoilt:
            engines[name]._kv.blocks.fill_(torch.nan)
        ends = [await tried() for _ in range(failing)]
        assert all(is_no_numbers(end) for end in ends), ends
        assert await tried() == answer
