"""Chunks of prompts and slots of decode in one pass: nobody's bits depend on who else is in it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

pytest.importorskip("transformers")


from pd_grpc.engine.base import DecodeSlot, PrefillChunk, Sampled, SampleSpec
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.sampling import Sampling
from tests.engine.torch_models import CONFIGS, NO_LAYER, VOCAB, Request, load_tiny, save_model

# With the twenty likeliest tokens beside it a token shows its logits.
SHOWN = Sampling(max_tokens=4, temperature=0.0, logprobs=20)
LENGTHS = (1, 7, 8, 40, 33, 2)

pytestmark = [pytest.mark.longest, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    folder = save_model(tmp_path_factory.mktemp("model"), CONFIGS["qwen3"]())
    return load_tiny(folder, dtype=request.param, num_blocks=128)


def running(engine: TorchEngine) -> list[Request]:
    """Requests that have their first token, each on blocks of its own."""
    requests = []
    for i, length in enumerate(LENGTHS):
        prompt = random.Random(i).choices(range(VOCAB), k=length)
        request = Request(prompt, range(8 * i, 8 * i + 8), SHOWN)
        (first,) = engine.prefill(request.chunks(64), NO_LAYER)
        assert first is not None
        request.output.append(first)
        requests.append(request)
    return requests


def arriving() -> list[list[PrefillChunk]]:
    """Two prompts in chunks of 32 tokens, on blocks that no running request has."""
    prompts = [random.Random(100 + n).choices(range(VOCAB), k=n) for n in (75, 9)]
    tables = range(64, 80), range(80, 96)
    return [
        Request(prompt, table, SHOWN).chunks(32)
        for prompt, table in zip(prompts, tables, strict=True)
    ]


def kv_of(engine: TorchEngine, table: Sequence[int], tokens: int) -> bytes:
    """What the pool holds of the whole blocks of so many tokens, layer by layer."""
    layers = engine.layout.groups[0].layers
    whole = tokens // engine.layout.block_size
    return b"".join(b"".join(engine.memory.read(table[:whole], 0, at, 1)) for at in range(layers))


def test_a_slot_and_a_chunk_have_the_bits_they_have_alone(engine: TorchEngine) -> None:
    slots = [request.slot() for request in running(engine)]
    alone = [engine.decode([slot])[0] for slot in slots]
    first, second = arriving()
    chunks_alone = [engine.prefill([chunk], NO_LAYER)[0] for chunk in (*first, *second)]
    kv_alone = kv_of(engine, range(64, 80), 75), kv_of(engine, range(80, 96), 9)
    for block in range(64, 96):
        engine.memory.write([block], 0, 0, 3, memoryview(bytes(engine.layout.block_bytes)))

    mixed = [engine.step([first[0], second[0]], slots, NO_LAYER)]
    mixed += [engine.step([chunk], slots[at:], NO_LAYER) for at, chunk in enumerate(first[1:], 1)]

    chosen: list[Sampled | None] = [mixed[0][0][0], *(step[0][0] for step in mixed[1:])]
    assert [*chosen, mixed[0][0][1]] == chunks_alone
    for at, (_, decoded) in enumerate(mixed):
        assert decoded == alone[at:]
    assert kv_alone == (kv_of(engine, range(64, 80), 75), kv_of(engine, range(80, 96), 9))


def test_every_layer_is_told_of_once_for_all_of_a_step(engine: TorchEngine) -> None:
    seen: list[tuple[int, int]] = []
    slots = [request.slot() for request in running(engine)]

    engine.step([arriving()[0][0]], slots, lambda group, layer: seen.append((group, layer)))

    assert seen == [(0, 0), (0, 1), (0, 2)]


def test_a_step_of_one_kind_alone_and_one_of_nothing(engine: TorchEngine) -> None:
    spec = SampleSpec(SHOWN, 2, 1)
    chunk, slot = PrefillChunk([5, 6], 0, [100]), DecodeSlot(7, 1, [101], spec)

    assert engine.step([chunk], [], NO_LAYER) == ([None], [])
    prefilled, (token,) = engine.step([], [slot], NO_LAYER)
    assert prefilled == [] and [token] == engine.decode([slot])
    assert engine.step([], [], NO_LAYER) == ([], [])


@pytest.mark.parametrize("cuts", [(256, 144), (128, 272), (128, 128, 128, 16), (384, 16)])
def test_a_prompts_kv_is_the_same_wherever_it_is_cut(
    engine: TorchEngine, cuts: tuple[int, ...]
) -> None:
    prompt = random.Random(5).choices(range(VOCAB), k=400)
    request = Request(prompt, range(50), SHOWN)
    whole = engine.prefill(request.chunks(400), NO_LAYER)
    meant = kv_of(engine, range(50), 400)
    spec, table = SampleSpec(SHOWN, 400, 0), range(60, 110)

    at = 0
    for tokens in cuts:
        end = at + tokens
        chunk = PrefillChunk(prompt[at:end], at, table, spec if end == 400 else None)
        chosen = engine.prefill([chunk], NO_LAYER)
        at = end

    assert chosen == whole
    assert kv_of(engine, table, 400) == meant
