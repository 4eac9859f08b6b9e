"""Host memory of a pool: slabs in and out, in the canonical order, without a stray byte."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.shards import Part

NUM_BLOCKS = 5
# Two groups of different shapes, so that an offset taken from the wrong one shows.
LAYOUT = KvLayout(
    model="m",
    positions="p",
    block_size=3,
    groups=(
        KvGroup(
            GroupKind.FULL,
            2,
            (Plane(PlaneKind.K, "bfloat16", 2, 4), Plane(PlaneKind.V, "uint8", 1, 5)),
        ),
        KvGroup(GroupKind.FULL, 3, (Plane(PlaneKind.K, "float32", 1, 2),)),
    ),
)
# Bytes of one layer of a block, by hand: 3 tokens of (2*4*2 + 1*5), and of 1*2*4.
LAYER_BYTES = (63, 24)
BLOCK_BYTES = 2 * 63 + 3 * 24
LAYER_AT = ((0, 63), (126, 150, 174))


def filled(seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(NUM_BLOCKS * BLOCK_BYTES))


@st.composite
def slabs(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """(blocks, group, layer, layers), all in bounds."""
    blocks = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS))
    group = draw(st.integers(0, 1))
    held = LAYOUT.groups[group].layers
    layer = draw(st.integers(0, held - 1))
    return blocks, group, layer, draw(st.integers(1, held - layer))


def places(blocks: list[int], group: int, layer: int, layers: int) -> list[slice]:
    """Where the slab lies in the pool."""
    starts = [block * BLOCK_BYTES + LAYER_AT[group][layer] for block in blocks]
    return [slice(at, at + layers * LAYER_BYTES[group]) for at in starts]


@settings(deadline=None)
@given(slabs())
def test_a_slab_is_read_from_where_the_layout_puts_it(
    slab: tuple[list[int], int, int, int],
) -> None:
    buffer = filled()
    pieces = HostKvMemory(buffer, LAYOUT).read(*slab)
    assert [bytes(piece) for piece in pieces] == [bytes(buffer[at]) for at in places(*slab)]


@settings(deadline=None)
@given(slabs())
def test_a_slab_is_written_there_and_nowhere_else(slab: tuple[list[int], int, int, int]) -> None:
    buffer, source = filled(1), filled(2)
    expected = bytearray(buffer)
    for at in places(*slab):
        expected[at] = source[at]
    payload = b"".join(HostKvMemory(source, LAYOUT).read(*slab))
    HostKvMemory(buffer, LAYOUT).write(*slab, memoryview(payload))
    assert buffer == expected


def test_pieces_are_views_of_the_pool_that_cannot_be_written() -> None:
    buffer = filled()
    (piece,) = HostKvMemory(buffer, LAYOUT).read([1], 1, 2, 1)
    buffer[BLOCK_BYTES + 174] ^= 0xFF
    assert piece[0] == buffer[BLOCK_BYTES + 174]
    with pytest.raises(TypeError):
        piece[0] = 0


def test_whole_blocks_that_lie_one_behind_another_are_one_piece() -> None:
    planes = (Plane(PlaneKind.K, "uint8", 1, 4),)
    layout = KvLayout("m", "p", 2, (KvGroup(GroupKind.FULL, 3, planes),))
    size = layout.block_bytes
    buffer = bytearray(range(8 * size))
    memory = HostKvMemory(buffer, layout)
    pieces = memory.read([2, 3, 4, 1, 0, 1], 0, 0, 3)
    assert [len(piece) // size for piece in pieces] == [3, 1, 2]
    blocks = [buffer[b * size : (b + 1) * size] for b in (2, 3, 4, 1, 0, 1)]
    assert b"".join(pieces) == b"".join(blocks)
    assert len(memory.read([2, 3], 0, 0, 2)) == 2, "their layers do not"


def test_a_payload_of_wider_items_is_taken_as_its_bytes() -> None:
    buffer = filled()
    payload = memoryview(bytes(range(24))).cast("I")
    HostKvMemory(buffer, LAYOUT).write([0], 1, 0, 1, payload)
    assert buffer[126:150] == bytes(range(24))


@pytest.mark.parametrize(
    "slab",
    [
        ([5], 0, 0, 1),
        ([-1], 0, 0, 1),
        ([0], 0, 2, 1),
        ([0], 0, 1, 2),
        ([0], 0, -1, 1),
        ([0], 0, 0, 0),
    ],
)
def test_a_slab_out_of_bounds_is_refused_and_nothing_written(
    slab: tuple[list[int], int, int, int],
) -> None:
    buffer = filled()
    before = bytes(buffer)
    memory = HostKvMemory(buffer, LAYOUT)
    with pytest.raises(ValueError, match=r"outside the pool|it has 2"):
        memory.read(*slab)
    payload = memoryview(bytes(max(0, slab[3]) * 63))
    with pytest.raises(ValueError, match=r"outside the pool|it has 2"):
        memory.write(*slab, payload)
    assert buffer == before


@pytest.mark.parametrize("size", [0, 62, 64, 126])
def test_a_payload_of_another_size_than_the_slab_is_refused(size: int) -> None:
    buffer = filled()
    before = bytes(buffer)
    with pytest.raises(ValueError, match=f"payload has {size} bytes"):
        HostKvMemory(buffer, LAYOUT).write([2], 0, 1, 1, memoryview(bytes(size)))
    assert buffer == before


def test_the_pool_is_a_whole_number_of_blocks() -> None:
    assert HostKvMemory(filled(), LAYOUT).num_blocks == NUM_BLOCKS
    for size in (0, BLOCK_BYTES - 1, BLOCK_BYTES + 1):
        with pytest.raises(ValueError, match=f"pool of {size} bytes"):
            HostKvMemory(bytearray(size), LAYOUT)


HEADS = KvLayout(
    model="m",
    positions="p",
    block_size=2,
    groups=(
        KvGroup(GroupKind.FULL, 1, (Plane(PlaneKind.K, "uint8", 4, 1),)),
        KvGroup(
            GroupKind.FULL,
            3,
            (
                Plane(PlaneKind.K, "uint8", 4, 3),
                Plane(PlaneKind.V, "uint8", 4, 3),
                Plane(PlaneKind.SCALE, "float16", 4, 1),
            ),
        ),
    ),
)
HERE = Part(0, 3, 1, 3)
"""Of the first group its layer, of the second two, and all heads but the first."""
HEAD_BYTES = ((2,), (6, 6, 4))
HERE_BYTES = 3 * (2 + 2 * 16)


@st.composite
def head_slabs(draw: st.DrawFn) -> tuple[list[int], int, int, int, tuple[int, int]]:
    """(blocks, group, layer, layers, heads), all here."""
    blocks = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS))
    group = draw(st.integers(0, 1))
    held = (1, 2)[group]
    layer = draw(st.integers(0, held - 1))
    head = draw(st.integers(1, 3))
    heads = head, draw(st.integers(1, 4 - head))
    return blocks, group, layer, draw(st.integers(1, held - layer)), heads


def head_bytes(
    blocks: list[int], group: int, layer: int, layers: int, heads: tuple[int, int]
) -> list[int]:
    """Where each byte of the slab lies in the pool, by hand."""
    found: list[int] = []
    for block in blocks:
        for each in range(layer, layer + layers):
            at = block * HERE_BYTES + (0, 6)[group] + each * 3 * sum(HEAD_BYTES[group])
            for size in HEAD_BYTES[group]:
                first = at + (heads[0] - 1) * size
                found += range(first, first + heads[1] * size)
                at += 3 * size
    return found


@settings(deadline=None)
@given(head_slabs())
def test_heads_are_read_from_each_plane_and_written_there_and_nowhere_else(
    slab: tuple[list[int], int, int, int, tuple[int, int]],
) -> None:
    blocks, group, layer, layers, heads = slab
    content = random.Random(3).randbytes(NUM_BLOCKS * HERE_BYTES)
    places = head_bytes(*slab)
    pieces = HostKvMemory(bytearray(content), HEADS, part=HERE).read(*slab)
    payload = b"".join(pieces)
    assert payload == bytes(content[at] for at in places)
    assert all(piece.readonly for piece in pieces)
    buffer = bytearray(len(content))
    into = HostKvMemory(buffer, HEADS, part=HERE)
    into.write(blocks, group, layer, layers, memoryview(payload), heads)
    expected = bytearray(len(content))
    for at in places:
        expected[at] = content[at]
    assert buffer == expected


@pytest.mark.parametrize(
    ("heads", "size", "why"),
    [
        ((0, 2), 16, r"heads \[0, 2\): \[1, 4\) are here"),
        ((3, 2), 16, r"heads \[3, 5\): \[1, 4\) are here"),
        ((1, 0), 0, r"heads \[1, 1\)"),
        ((1, 2), 31, "payload has 31 bytes; 1 blocks of 1 layers take 32"),
        ((1, 2), 33, "payload has 33 bytes"),
    ],
)
def test_heads_that_are_not_here_or_of_another_size_are_refused(
    heads: tuple[int, int], size: int, why: str
) -> None:
    buffer = bytearray(NUM_BLOCKS * HERE_BYTES)
    memory = HostKvMemory(buffer, HEADS, part=HERE)
    with pytest.raises(ValueError, match=why):
        memory.write([1], 1, 0, 1, memoryview(b"\1" * size), heads)
    with pytest.raises(ValueError, match="block 5 is outside"):
        memory.write([5], 1, 0, 1, memoryview(bytes(16)), (1, 1))
    assert not any(buffer)
