"""The sim engine's other layouts: scales, a sliding group, and a pool held token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_grpc.blocks.pool import Holding
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.sim_layouts import TOKEN_MAJOR, sim_layout
from pd_grpc.engine.sim_reference import SimKv, sim_answer
from pd_grpc.engine.token_major import TokenMajorMemory
from pd_grpc.protocol.config import EngineConfig, SimLayout
from pd_grpc.protocol.layout import (
    CANONICAL,
    DTYPE_BYTES,
    GroupKind,
    KvGroup,
    KvLayout,
    Plane,
    PlaneKind,
)
from pd_grpc.protocol.sampling import Sampling
from tests.engine.test_sim import GREEDY, SEEDED, SMALL, Side, prompt

LAYOUTS = get_args(SimLayout)
FORMATS = ("canonical", "token-major")


def small(layout: str, form: str = "canonical", window: int = 6) -> EngineConfig:
    change = {"sim_layout": layout, "sim_format": form, "sim_window": window}
    return SMALL.model_copy(update=change)


def test_the_layouts_are_what_the_rule_says() -> None:
    layout = sim_layout(small("sliding-fp8-scale"))
    heads, dim = SMALL.sim_heads, SMALL.sim_head_dim
    assert layout.groups == (
        KvGroup(
            GroupKind.FULL,
            3,
            (
                Plane(PlaneKind.K, "float8_e4m3", heads, dim),
                Plane(PlaneKind.V, "float8_e4m3", heads, dim),
                Plane(PlaneKind.SCALE, "float32", heads, 2),
            ),
        ),
        KvGroup(
            GroupKind.SLIDING,
            4,
            (
                Plane(PlaneKind.K, "bfloat16", 2 * heads, dim),
                Plane(PlaneKind.V, "bfloat16", 2 * heads, dim),
            ),
            window=6,
        ),
    )
    assert sim_layout(small("fp8-scale")).groups == layout.groups[:1]
    assert sim_layout(small("sliding")).groups[1:] == layout.groups[1:]
    assert sim_layout(small("plain", "token-major")).format == TOKEN_MAJOR


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    chunk=st.integers(1, 41),
    layout=st.sampled_from(LAYOUTS),
    form=st.sampled_from(FORMATS),
    window=st.integers(1, 50),
    block_size=st.sampled_from((1, 4, 7)),
)
def test_an_answer_through_the_pool_is_the_reference_answer(
    length: int, seed: int, chunk: int, layout: str, form: str, window: int, block_size: int
) -> None:
    config = small(layout, form, window).model_copy(
        update={"block_size": block_size, "num_blocks": 64}
    )
    side = Side(config, shuffle=seed)
    ids = prompt(length, seed, config.sim_vocab)
    assert side.answer(ids, SEEDED, chunk) == sim_answer(ids, SEEDED, config)
    side.check_all_returned()


def test_the_rule_of_the_other_layouts_does_not_change_unnoticed() -> None:
    hello = [3 + byte for byte in b"Hello, world"]
    sampling = Sampling(max_tokens=3, temperature=0.0)
    found = {
        layout: sim_answer(hello, sampling, EngineConfig(sim_layout=layout, sim_window=5))
        for layout in LAYOUTS
    }
    assert found["plain"] == [16236, 31993, 29435]
    assert len({tuple(answer) for answer in found.values()}) == len(LAYOUTS)


@pytest.fixture(params=[(layout, form) for layout in LAYOUTS for form in FORMATS], ids="-".join)
def held(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Holding, list[int], int]]:
    """A side with a prompt of 18 tokens, and the first token of its answer."""
    side = Side(small(*request.param), shuffle=5)
    ids = prompt(18)
    holding = side.take(18)
    yield side, holding, ids, side.prefill(holding, ids, GREEDY)
    holding.release()
    side.check_all_returned()


def spans(layout: KvLayout) -> Iterator[tuple[int, int, int, int, int]]:
    """Each (group, layer, plane) with where its bytes are in a canonical layer of a block."""
    for g, group in enumerate(layout.groups):
        for layer in range(group.layers):
            at = 0
            for p, plane in enumerate(group.planes):
                size = plane.token_bytes * layout.block_size
                yield g, layer, p, at, at + size
                at += size


def test_each_plane_of_each_layer_and_group_decides_the_next_token(
    held: tuple[Side, Holding, list[int], int],
) -> None:
    """Also where a byte of it, canonical or not, is planted in the pool behind the engine."""
    side, holding, ids, first = held
    layout, memory = side.engine.layout, side.engine.memory

    def second() -> int:
        return side.step(holding, len(ids), [first], GREEDY)

    right = second()
    assert right == sim_answer(ids, GREEDY, side.config)[1]
    draw = random.Random(1)
    # Position 17 stands in slot 1 of block 4; within any window of two and more.
    for g, layer, _plane, start, end in spans(layout):
        (clean,) = memory.read([holding.blocks[4]], g, layer, 1)
        kept = bytes(clean)
        row = _row_bytes(layout, g, start)
        slots = [at for at in range(start, end) if (at - start) // row % layout.block_size == 1]
        damaged = bytearray(kept)
        damaged[draw.choice(slots)] ^= 1 << draw.randrange(8)
        memory.write([holding.blocks[4]], g, layer, 1, memoryview(damaged))
        assert second() != right
        memory.write([holding.blocks[4]], g, layer, 1, memoryview(kept))
        memory.write([holding.blocks[4]], g, layer, 1, memoryview(bytes(len(kept))))
        assert second() != right
        memory.write([holding.blocks[4]], g, layer, 1, memoryview(kept))
    assert second() == right


def _row_bytes(layout: KvLayout, group: int, start: int) -> int:
    """Bytes of a head and token in the plane that begins at `start` of a layer."""
    at = 0
    for plane in layout.groups[group].planes:
        if at == start:
            return plane.head_dim * DTYPE_BYTES[plane.dtype]
        at += plane.token_bytes * layout.block_size
    raise AssertionError(f"no plane begins at {start}")


@pytest.mark.parametrize("form", FORMATS)
def test_a_sliding_group_counts_within_its_window_alone(form: str) -> None:
    """The second token stands at 19 and sees the last six of the tokens before it: from 13 on,
    which is slot 1 of block 3."""
    side = Side(small("sliding", form), shuffle=2)
    ids = prompt(18)
    holding = side.take(18)
    first = side.prefill(holding, ids, GREEDY)
    right = side.step(holding, 18, [first], GREEDY)
    memory, layout = side.engine.memory, side.engine.layout
    for block in range(5):
        for group in range(2):
            layers = layout.groups[group].layers
            (kept,) = [bytes(b) for b in memory.read([holding.blocks[block]], group, 0, layers)]
            memory.write([holding.blocks[block]], group, 0, layers, memoryview(bytes(len(kept))))
            changed = side.step(holding, 18, [first], GREEDY) != right
            assert changed == (group == 0 or block >= 3)
            memory.write([holding.blocks[block]], group, 0, layers, memoryview(kept))
    # In block 3 slot 0 is out of sight, slot 1 is not.
    row = SMALL.sim_head_dim * 2
    for slot, seen in ((0, False), (1, True)):
        (kept,) = [bytes(piece) for piece in memory.read([holding.blocks[3]], 1, 0, 1)]
        damaged = bytearray(kept)
        damaged[slot * row] ^= 1
        memory.write([holding.blocks[3]], 1, 0, 1, memoryview(damaged))
        assert (side.step(holding, 18, [first], GREEDY) != right) == seen
        memory.write([holding.blocks[3]], 1, 0, 1, memoryview(kept))
    holding.release()
    side.check_all_returned()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_major_pool_holds_other_bytes_and_speaks_the_same(layout: str) -> None:
    plain, turned = Side(small(layout)), Side(small(layout, "token-major"))
    ids = prompt(8)
    kv = SimKv(plain.config)
    tokens = [kv.append(token) for token in ids[:4]]
    held = [side.take(8) for side in (plain, turned)]
    for side, holding in zip((plain, turned), held, strict=True):
        side.prefill(holding, ids, GREEDY)
    own = plain.engine.layout
    assert (own.format, turned.engine.layout.format) == (CANONICAL, TOKEN_MAJOR)
    assert plain.engine.memory.stored is plain.engine.memory
    at = 0
    for g, group in enumerate(own.groups):
        for layer in range(group.layers):
            a, b = (
                [bytes(piece) for piece in side.engine.memory.read(holding.blocks, g, layer, 1)]
                for side, holding in zip((plain, turned), held, strict=True)
            )
            assert a == b
            (lies,) = turned.engine.memory.stored.read(held[1].blocks[:1], g, layer, 1)
            assert bytes(lies) == b"".join(each[at : at + group.token_bytes] for each in tokens)
            assert bytes(lies) != a[0]
            at += group.token_bytes
    for side, holding in zip((plain, turned), held, strict=True):
        holding.release()
        side.check_all_returned()


@given(st.data())
def test_what_is_written_to_a_token_major_pool_is_read_back(data: st.DataObject) -> None:
    layout = sim_layout(small("sliding-fp8-scale", "token-major"))
    memory = TokenMajorMemory(HostKvMemory(bytearray(6 * layout.block_bytes), layout), layout)
    group = data.draw(st.sampled_from((0, 1)))
    layer = data.draw(st.integers(0, layout.groups[group].layers - 1))
    layers = data.draw(st.integers(1, layout.groups[group].layers - layer))
    blocks = data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 6))]
    size = len(blocks) * layers * layout.layer_bytes(group)
    payload = random.Random(size).randbytes(size)
    memory.write(blocks, group, layer, layers, memoryview(payload))
    assert b"".join(memory.read(blocks, group, layer, layers)) == payload
    untouched = [b for b in range(6) if b not in blocks]
    assert not any(b"".join(memory.read(untouched, g, 0, 3)).strip(b"\0") for g in (0, 1))
    with pytest.raises(ValueError, match="payload has"):
        memory.write(blocks, group, layer, layers, memoryview(payload + b"\0"))
