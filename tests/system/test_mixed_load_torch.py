"""A tiny model under a mixed load: prompts and decode in one step, prefixes found, D out of blocks.

Whoever prefills, every answer is that of an engine that had nothing else to do.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")


from pd_grpc.decode.actions import Changed
from pd_grpc.decode.states import DecodeState
from pd_grpc.engine.base import Engine
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling
from tests.cluster import cluster
from tests.engine.torch_models import (
    CONFIGS,
    VOCAB,
    Request,
    decode,
    load_for,
    load_tiny,
    prefill,
    save_model,
)
from tests.system.asking import ask, request

pytestmark = pytest.mark.usefixtures("one_thread")

Asked = list[tuple[list[int], Sampling]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), CONFIGS["llama"]())


@pytest.fixture(scope="module")
def asked() -> Asked:
    """Prompts of up to 300 tokens, many of which begin alike."""
    draw = random.Random(8)
    shared = draw.choices(range(VOCAB), k=250)
    found = []
    for i in range(14):
        prompt = shared[: draw.choice((0, 24, 130, 250))] + draw.choices(range(VOCAB), k=1 + 3 * i)
        heat = 0.9 if i % 2 else 0.0
        found.append(
            (prompt, Sampling(max_tokens=20 + i, temperature=heat, seed=i, ignore_eos=True))
        )
    return found


@pytest.fixture(scope="module")
def alone(model: Path, asked: Asked) -> list[list[int]]:
    """The answers of an engine that serves one request after another."""
    engine = load_tiny(model)
    answers = []
    for prompt, sampling in asked:
        one = Request(prompt, range(64), sampling)
        prefill(engine, [one], chunk_tokens=512)
        decode(engine, [one])
        answers.append(one.tokens)
    return answers


class Mixing(TorchEngine):
    """Counts the steps that had chunks and slots."""

    mixed = 0

    def step(self, chunks: Any, slots: Any, on_layer: Any) -> Any:
        self.mixed += bool(chunks) and bool(slots)
        return super().step(chunks, slots, on_layer)


@pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "apart"])
async def test_every_answer_is_that_of_an_engine_with_nothing_else_to_do(
    model: Path, asked: Asked, alone: list[list[int]], aggregated: bool
) -> None:
    moves: list[DecodeState] = []

    def load(config: EngineConfig) -> Engine:
        engine = load_for(config, model)
        engine.__class__ = Mixing
        return engine

    async with cluster(
        load=load,
        aggregated=aggregated,
        engine="torch",
        dtype="float32",
        block_size=8,
        num_blocks=72,
        chunk_tokens=128,
        max_batch=6,
    ) as running:
        (d,) = running.decodes
        d.runtime.listeners.append(lambda change: _note(moves, change))
        async with running.client() as stub:
            messages = [request(prompt, sampling) for prompt, sampling in asked]
            replies = await asyncio.gather(*(ask(stub, message) for message in messages))
        assert [reply.token_ids for reply in replies] == alone
        assert DecodeState.PREEMPTED in moves
        assert d.machine.ledger.cache.found_blocks > 0
        if aggregated:
            assert isinstance(d.engine, Mixing) and d.engine.mixed > 0


def _note(moves: list[DecodeState], change: Changed) -> None:
    moves.append(change.after)
