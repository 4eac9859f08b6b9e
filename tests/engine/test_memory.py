"""Host memory of a pool: slabs in and out, in the canonical order, without a stray byte."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind

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
