"""The torch engine against transformers itself, alone and in batches, here and handed over."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

from pd_grpc.engine.base import DecodeSlot, EngineFault, PrefillChunk, SampleSpec
from pd_grpc.engine.batch_rows import filled, steady_group
from pd_grpc.engine.packed_linear import Linear
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.layout import GroupKind
from pd_grpc.protocol.sampling import Sampling
from tests.engine.torch_models import (
    CONFIGS,
    NO_LAYER,
    SIZES,
    VOCAB,
    Request,
    decode,
    eager_tokens,
    load_tiny,
    prefill,
)

GREEDY = Sampling(max_tokens=12, temperature=0.0)

pytestmark = [pytest.mark.longest, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> TorchEngine:
    return load_tiny(folders["llama"])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(VOCAB), k=length)


def scattered(count: int, seed: int = 0, num_blocks: int = 64) -> list[int]:
    """`count` blocks of the pool in no order."""
    return random.Random(seed).sample(range(num_blocks), count)


def requests_of(
    lengths: list[int], samplings: list[Sampling], num_blocks: int = 64
) -> list[Request]:
    """Requests that share the pool, each on blocks of its own."""
    free = scattered(num_blocks, num_blocks=num_blocks)
    requests = []
    for i, (length, sampling) in enumerate(zip(lengths, samplings, strict=True)):
        blocks = -(-(length + sampling.max_tokens) // 8)
        table, free = free[:blocks], free[blocks:]
        requests.append(Request(prompt_of(length, i), table, sampling))
    return requests


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, 75])
def test_greedy_tokens_are_those_of_transformers(
    folders: dict[str, Path], name: str, length: int
) -> None:
    engine = load_tiny(folders[name])
    request = Request(prompt_of(length), scattered(12), GREEDY)

    prefill(engine, [request])
    decode(engine, [request])

    assert request.tokens == eager_tokens(folders[name], request.prompt, GREEDY.max_tokens)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    engine = load_tiny(folders[name])
    prompt = prompt_of(70)
    sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=20)
    request = Request(prompt, scattered(10), sampling)

    prefill(engine, [request])

    model = AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
    (sampled,) = request.output
    for entry in sampled.top:
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=2e-4)


def seeded(i: int) -> Sampling:
    return Sampling(max_tokens=10 + i % 3, temperature=0.9, top_p=0.95, seed=i, logprobs=2)


@pytest.mark.parametrize("how", ["greedy", "seeded"])
def test_a_request_gives_the_same_alone_and_with_eight_others(llama: TorchEngine, how: str) -> None:
    lengths = [1, 7, 8, 9, 40, 33, 64, 2, 15]
    samplings = [GREEDY if how == "greedy" else seeded(i) for i in range(9)]
    together = requests_of(lengths, samplings)
    prefill(llama, together)
    decode(llama, together)

    for other in requests_of(lengths, samplings):
        prefill(llama, [other])
        decode(llama, [other])
        (twin,) = [r for r in together if r.prompt == other.prompt]
        assert other.tokens == twin.tokens
        for ours, theirs in zip(other.output, twin.output, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, seeded(4)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [7, 8, 9, 75])
def test_tokens_are_the_same_when_the_kv_moves_to_another_engine(
    folders: dict[str, Path], sampling: Sampling, length: int
) -> None:
    p, d = load_tiny(folders["qwen3"]), load_tiny(folders["qwen3"])
    request = Request(prompt_of(length), scattered(12, seed=1), sampling)
    moved = Request(request.prompt, scattered(12, seed=2), sampling)
    prefill(p, [request])
    first = request.output[0]

    blocks = p.layout.blocks_for(length)
    for layer in range(p.layout.groups[0].layers):
        slab = b"".join(p.memory.read(request.table[:blocks], 0, layer, 1))
        d.memory.write(moved.table[:blocks], 0, layer, 1, memoryview(slab))
    moved.output.append(first)
    decode(d, [moved])
    decode(p, [request])

    assert moved.output == request.output


def test_prefill_tells_of_each_layer_once_its_kv_is_there_for_every_chunk(
    llama: TorchEngine,
) -> None:
    llama.memory.write(range(64), 0, 0, 3, memoryview(bytes(64 * llama.layout.block_bytes)))
    chunks = [
        PrefillChunk(prompt_of(16), 0, [5, 9]),
        PrefillChunk(prompt_of(8), 0, [30]),
    ]
    seen = []

    def on_layer(group: int, layer: int) -> None:
        filled_layers = [
            all(
                np.frombuffer(piece, np.float32).any()
                for piece in llama.memory.read([5, 9, 30], 0, at, 1)
            )
            for at in range(3)
        ]
        seen.append((group, layer, filled_layers))

    result = llama.prefill(chunks, on_layer)

    assert result == [None, None]
    assert seen == [
        (0, 0, [True, False, False]),
        (0, 1, [True, True, False]),
        (0, 2, [True, True, True]),
    ]


def test_what_on_layer_raises_ends_the_step_as_it_is(llama: TorchEngine) -> None:
    class Cancelled(RuntimeError):
        pass

    def on_layer(group: int, layer: int) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        llama.prefill([PrefillChunk([1, 2], 0, [0])], on_layer)


def test_the_bytes_of_a_block_lie_in_the_canonical_order(folders: dict[str, Path]) -> None:
    engine = load_tiny(folders["llama"])
    prompt = prompt_of(21)
    engine.prefill([PrefillChunk(prompt, 0, [11, 4, 50])], NO_LAYER)
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], attn_implementation="eager")
    with torch.inference_mode():
        cache = model(torch.tensor([prompt]), use_cache=True).cache
    position, layer, head = 13, 2, 1
    block, token = [11, 4, 50][position // 8], position % 8
    layers, heads, tokens, dim = 3, 2, 8, 8

    whole = b"".join(engine.memory.read([block], 0, 0, layers))
    floats = np.frombuffer(whole, "<f4")
    for plane, expected in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
        at = (((layer * 2 + plane) * heads + head) * tokens + token) * dim
        np.testing.assert_allclose(
            floats[at : at + dim], expected[0, head, position].numpy(), atol=1e-5
        )


def test_the_layout_says_what_the_pool_holds(llama: TorchEngine) -> None:
    (group,) = llama.layout.groups

    assert (group.kind, group.layers, group.window) == (GroupKind.FULL, 3, 0)
    assert [(p.kind.name, p.dtype, p.heads, p.head_dim) for p in group.planes] == [
        ("K", "float32", 2, 8),
        ("V", "float32", 2, 8),
    ]
    assert llama.memory.num_blocks == 64
    assert llama.layout.block_bytes == 3 * 2 * 2 * 8 * 8 * 4


def test_a_step_touches_no_block_but_its_own(llama: TorchEngine) -> None:
    marked = bytes([7]) * llama.layout.block_bytes
    others = [b for b in range(64) if b not in (3, 8)]
    llama.memory.write(others, 0, 0, 3, memoryview(marked * len(others)))
    request = Request(prompt_of(12), [8, 3], GREEDY)

    prefill(llama, [request])
    llama.decode([request.slot()])

    assert b"".join(llama.memory.read(others, 0, 0, 3)) == marked * len(others)


def test_a_pool_full_of_rubbish_changes_nothing(folders: dict[str, Path]) -> None:
    clean, dirty = load_tiny(folders["llama"]), load_tiny(folders["llama"])
    rubbish = np.full(64 * dirty.layout.block_bytes // 4, np.nan, np.float32)
    dirty.memory.write(range(64), 0, 0, 3, memoryview(rubbish.tobytes()))
    requests = [Request(prompt_of(19), scattered(5), GREEDY) for _ in range(2)]

    for engine, request in zip((clean, dirty), requests, strict=True):
        prefill(engine, [request])
        decode(engine, [request])

    assert requests[0].output == requests[1].output


@pytest.mark.parametrize(
    ("token_ids", "table"),
    [
        pytest.param([1, 2], [64], id="block outside the pool"),
        pytest.param([1, 2], [-1], id="negative block"),
        pytest.param([1] * 9, [3], id="table too short"),
        pytest.param([], [3], id="no tokens"),
        pytest.param([1, VOCAB], [3], id="token outside the vocabulary"),
    ],
)
def test_a_step_that_cannot_run_is_a_fault_and_the_engine_stays_usable(
    llama: TorchEngine, token_ids: list[int], table: list[int]
) -> None:
    spec = SampleSpec(GREEDY, 2, 1)
    before = b"".join(llama.memory.read([63], 0, 0, 3))

    with pytest.raises(EngineFault):
        llama.prefill([PrefillChunk(token_ids, 0, table, spec)], NO_LAYER)

    assert b"".join(llama.memory.read([63], 0, 0, 3)) == before
    assert len(llama.decode([DecodeSlot(1, 0, [0], spec)])) == 1


def test_a_row_that_gives_no_token_is_its_requests_fault_alone(folders: dict[str, Path]) -> None:
    """S4: its KV is no numbers, or its sampling leaves nothing to choose."""
    engine = load_tiny(folders["llama"])
    rubbish = np.full(engine.layout.block_bytes // 4, np.nan, np.float32)
    engine.memory.write([0], 0, 0, 3, memoryview(rubbish.tobytes()))
    nothing = Sampling(max_tokens=9, min_tokens=5, stop_token_ids=tuple(range(VOCAB)))
    alone, beside = (Request(prompt_of(19), scattered(5), GREEDY) for _ in range(2))
    for request in (alone, beside):
        prefill(engine, [request])
    slot = DecodeSlot(beside.output[-1].token_id, 19, beside.table, SampleSpec(GREEDY, 20, 1))
    (meant,) = engine.decode([slot])

    (prefilled,), decoded = engine.step(
        [PrefillChunk([5, 6], 0, [1], SampleSpec(nothing, 2, 0))],
        [
            DecodeSlot(1, 3, [0], SampleSpec(GREEDY, 4, 1)),
            slot,
            DecodeSlot(1, 0, [2], SampleSpec(nothing, 1, 1)),
        ],
        NO_LAYER,
    )

    assert decoded[1] == meant and not meant.fault
    assert prefilled is not None and "no token" in prefilled.fault
    assert "finite" in decoded[0].fault and "no token" in decoded[2].fault
    assert [row.not_finite for row in (prefilled, *decoded)] == [False, True, False, False]


def test_an_empty_batch_is_no_work(llama: TorchEngine) -> None:
    assert llama.prefill([], NO_LAYER) == []
    assert llama.decode([]) == []


def test_warming_up_touches_block_zero_alone(folders: dict[str, Path]) -> None:
    engine = load_tiny(folders["llama"])
    engine.warm_up()

    rest = b"".join(engine.memory.read(range(1, 64), 0, 0, 3))
    assert not any(rest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_rows_bits_do_not_depend_on_its_neighbours(folders: dict[str, Path], dtype: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=getattr(torch, dtype))
    plain, packed = (
        Linear([layer.weight], [None])
        for layer in (model.model.layers[0].mlp.gate_proj, model.model.layers[1].mlp.gate_proj)
    )
    packed.pack()
    rows = torch.randn(40, SIZES["hidden_size"]).to(plain.dtype)

    with torch.inference_mode():
        for product in (plain, packed):
            group = steady_group([product])
            many = product(rows)
            for count in range(1, 33):
                few = product(rows[: filled(count, group)])
                assert torch.equal(few[:count], many[:count])
