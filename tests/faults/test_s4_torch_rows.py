"""S4: a request of which a real model makes no numbers fails alone, on P and on D, while those
beside it in the same steps get their answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

pytest.importorskip("transformers")

import torch

from pd_grpc.engine.base import Engine
from pd_grpc.engine.load import load_engine
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from tests.cluster import cluster
from tests.engine.torch_models import CONFIGS, Request, decode, load_tiny, prefill, save_model
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


@pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "apart"])
async def test_what_a_model_makes_no_numbers_of_fails_alone(
    folder: Path, alone: list[list[int]], aggregated: bool
) -> None:
    def load(config: EngineConfig) -> Engine:
        engine = load_engine(config.model_copy(update={"model": str(folder)}))
        assert isinstance(engine, TorchEngine)
        with torch.inference_mode():
            engine._model.get_input_embeddings().weight[POISON] = torch.nan
        return engine

    async with cluster(
        load=load,
        aggregated=aggregated,
        engine="torch",
        dtype="float32",
        block_size=8,
        chunk_tokens=128,
        threads=1,
    ) as running:
        async with running.client() as stub:
            asked = [*GOOD[:3], BAD_PROMPT, BAD_OUTPUT, *GOOD[3:]]
            answers = await asyncio.gather(
                *(ask(stub, request(*each)) for each in asked), return_exceptions=True
            )
        for failed in (answers.pop(3), answers.pop(3)):
            assert isinstance(failed, grpc.aio.AioRpcError)
            fault = rpc.read_error(failed)
            assert isinstance(fault, Fault) and fault.reason is Reason.ENGINE_ERROR
            assert "not finite" in fault.message
        assert [getattr(answer, "token_ids", answer) for answer in answers] == alone
