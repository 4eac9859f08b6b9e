"""P and D whose pools are on a device that lags behind: over inline, through pinned memory."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from pd_grpc.engine.base import Engine
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import layout_pb2
from tests.cluster import cluster
from tests.engine.deferred_device import DeferredStreams
from tests.engine.torch_models import (
    CONFIGS,
    VOCAB,
    Request,
    beside,
    decode,
    load_tiny,
    prefill,
    save_model,
)
from tests.system.asking import ask, request

LENGTHS = (1, 8, 45, 90)


async def test_answers_are_those_of_one_engine_on_the_host(tmp_path: Path) -> None:
    """By no transport that needs an address, also where it is asked for."""
    host = load_tiny(save_model(tmp_path, CONFIGS["llama"]()), threads=1)

    def load(config: EngineConfig) -> Engine:
        streams = DeferredStreams(pace=30)
        return beside(host, config.num_blocks, config.shares_pool, streams)

    asked = []
    for i, length in enumerate(LENGTHS):
        prompt = random.Random(i).choices(range(VOCAB), k=length)
        asked.append((prompt, Sampling(max_tokens=6, temperature=0.8 * (i % 2), seed=i)))
    wanted = []
    for prompt, sampling in asked:
        alone = Request(prompt, range(16), sampling)
        prefill(host, [alone])
        decode(host, [alone])
        end = next((n for n, t in enumerate(alone.tokens, 1) if t in host.eos_token_ids), None)
        wanted.append(alone.tokens[:end])

    async with cluster(
        load=load,
        engine="torch",
        dtype="float32",
        num_blocks=64,
        block_size=8,
        chunk_tokens=32,
        transports=("shm", "inline"),
    ) as running:
        async with running.client() as stub:
            replies = await asyncio.gather(*(ask(stub, request(*each)) for each in asked))
        sessions = [s for p in running.prefills for s in p.machine.conversations.all()]
        assert [s.welcome.transport for s in sessions] == [layout_pb2.TRANSPORT_INLINE]
        await running.settled()
    assert [reply.token_ids for reply in replies] == wanted
