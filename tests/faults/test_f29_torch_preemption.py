"""F29: outputs that outgrow D's pool, with a real model in fp32. What is preempted is prefilled
again with the tokens it has, and its answer, greedy or seeded, is the one it has with room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.decode.actions import Changed
from pd_grpc.decode.server import DecodeServer
from pd_grpc.decode.states import DecodeState
from pd_grpc.engine.base import Engine, Tokenizer
from pd_grpc.engine.load import load_engine
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling
from tests.cluster import Cluster, cluster
from tests.engine.torch_models import another_pool
from tests.system.asking import Reply, ask, request

pytest.importorskip("transformers")

pytestmark = [pytest.mark.longest, pytest.mark.timeout(600)]

Load = Callable[[EngineConfig], Engine]
REQUESTS, MAX_TOKENS = 6, 64
BLOCKS_EACH = 6
"""That each has in the end, of 16 tokens; two fit a tight pool, and the prompts of all."""
ROOMY, TIGHT = 2 * REQUESTS * BLOCKS_EACH, 2 * BLOCKS_EACH + 1


@pytest.fixture(
    params=["emoji", pytest.param("smollm2", marks=[pytest.mark.model, pytest.mark.soak])]
)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    """Loads a tiny model, or the packaged one."""
    if request.param == "smollm2":
        return another_pool(request.getfixturevalue("smollm2"))
    emoji_model = pytest.importorskip("tests.engine.emoji_model")
    folder = emoji_model.save_emoji_model(tmp_path)

    def emoji(config: EngineConfig) -> Engine:
        return load_engine(config.model_copy(update={"model": str(folder)}))

    return emoji


def asked(tokenizer: Tokenizer) -> list[tuple[list[int], Sampling]]:
    """Greedy and seeded in turn, these from the whole vocabulary; nobody ends before the limit."""
    text = tokenizer.encode("Once upon a time there was 😀 a small é town by the sea.")
    return [
        (
            text[n : n + 16],
            Sampling(max_tokens=MAX_TOKENS, temperature=0.7 * (n % 2), seed=n, ignore_eos=True),
        )
        for n in range(REQUESTS)
    ]


async def answers(running: Cluster) -> list[Reply]:
    requests = asked(running.decodes[0].engine.tokenizer())
    async with running.client() as stub:
        return await asyncio.gather(
            *(ask(stub, request(*each), timeout_s=300) for each in requests)
        )


def preemptions(d: DecodeServer) -> Counter[str]:
    """Counts, as it goes on, how often each transfer is preempted."""
    seen: Counter[str] = Counter()

    def note(change: Changed) -> None:
        if change.after is DecodeState.PREEMPTED:
            seen[change.key.transfer_id] += 1

    d.runtime.listeners.append(note)
    return seen


async def test_what_is_preempted_says_what_it_says_with_room(load: Load) -> None:
    torch: dict[str, Any] = {
        "engine": "torch",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": ROOMY,
    }
    async with cluster(load=load, aggregated=True, **torch) as together:
        meant = await answers(together)
    tight = {"num_blocks": TIGHT}
    async with cluster(load=load, decode_settings=tight, **torch) as apart:
        seen = preemptions(apart.decodes[0])
        replies = await answers(apart)
    assert [reply.essence for reply in replies] == [reply.essence for reply in meant]
    assert len({reply.text for reply in replies}) == REQUESTS, "the prompt matters"
    assert len(seen) >= 2, "the pool was large enough for all, which shows nothing"
