"""Where each byte of a block lies, and what is said when two layouts differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.protocol.layout import (
    DTYPE_BYTES,
    GroupKind,
    KvGroup,
    KvLayout,
    Mismatch,
    Plane,
    PlaneKind,
)

K = Plane(PlaneKind.K, "bfloat16", heads=2, head_dim=8)
V = Plane(PlaneKind.V, "bfloat16", heads=2, head_dim=4)
SCALE = Plane(PlaneKind.SCALE, "float32", heads=2, head_dim=1)
LAYOUT = KvLayout(
    model="m",
    positions="rope",
    block_size=16,
    groups=(
        KvGroup(GroupKind.FULL, 3, (K, V)),
        KvGroup(GroupKind.SLIDING, 2, (K, V, SCALE), window=128),
    ),
)

planes = st.builds(
    Plane,
    kind=st.sampled_from(PlaneKind),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 8),
)
groups = st.builds(
    KvGroup,
    kind=st.sampled_from(GroupKind),
    layers=st.integers(1, 4),
    planes=st.lists(planes, min_size=1, max_size=3).map(tuple),
)
layouts = st.builds(
    KvLayout,
    model=st.just("m"),
    positions=st.just("p"),
    block_size=st.integers(1, 32),
    groups=st.lists(groups, min_size=1, max_size=3).map(tuple),
)


def elements(layout: KvLayout) -> Iterator[tuple[tuple[int, int], int]]:
    """Every element of a block in canonical order: its (group, layer) and its bytes."""
    for g, group in enumerate(layout.groups):
        for layer in range(group.layers):
            for plane in group.planes:
                for _head in range(plane.heads):
                    for _token in range(layout.block_size):
                        for _dimension in range(plane.head_dim):
                            yield (g, layer), DTYPE_BYTES[plane.dtype]


def test_sizes_of_a_known_layout() -> None:
    # K: 2 heads of 8 two-byte elements, V: 2 of 4, SCALE: 2 of one four-byte element.
    assert [plane.token_bytes for plane in (K, V, SCALE)] == [32, 16, 8]
    assert [group.token_bytes for group in LAYOUT.groups] == [48, 56]
    assert [LAYOUT.layer_bytes(g) for g in (0, 1)] == [768, 896]
    assert LAYOUT.block_bytes == 3 * 768 + 2 * 896
    assert LAYOUT.token_bytes == 3 * 48 + 2 * 56
    offsets = [LAYOUT.layer_offset(0, layer) for layer in range(3)]
    offsets += [LAYOUT.layer_offset(1, layer) for layer in range(2)]
    assert offsets == [0, 768, 1536, 2304, 3200]


@given(layouts)
def test_a_layer_begins_where_counting_every_element_before_it_says(layout: KvLayout) -> None:
    at, begins = 0, dict[tuple[int, int], int]()
    for layer, size in elements(layout):
        begins.setdefault(layer, at)
        at += size
    assert at == layout.block_bytes == layout.token_bytes * layout.block_size
    for (g, layer_number), offset in begins.items():
        assert layout.layer_offset(g, layer_number) == offset


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_an_element_is_as_large_as_its_dtype(dtype: str, size: int) -> None:
    assert Plane(PlaneKind.K, dtype, heads=1, head_dim=1).token_bytes == size


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_tokens_take_whole_blocks(tokens: int, blocks: int) -> None:
    assert LAYOUT.blocks_for(tokens) == blocks


def with_group(change: Callable[[KvGroup], KvGroup]) -> KvLayout:
    """LAYOUT with its second group changed."""
    return replace(LAYOUT, groups=(LAYOUT.groups[0], change(LAYOUT.groups[1])))


def with_plane(change: Callable[[Plane], Plane]) -> KvLayout:
    """LAYOUT with the second plane of its second group changed."""
    return with_group(lambda g: replace(g, planes=(g.planes[0], change(g.planes[1]), g.planes[2])))


@pytest.mark.parametrize(
    ("theirs", "field", "ours_shown", "theirs_shown"),
    [
        (replace(LAYOUT, model="n"), "model", "m", "n"),
        (replace(LAYOUT, positions="none"), "positions", "rope", "none"),
        (replace(LAYOUT, block_size=32), "block_size", "16", "32"),
        (replace(LAYOUT, groups=LAYOUT.groups[:1]), "groups", "2", "1"),
        (
            with_group(lambda g: replace(g, kind=GroupKind.FULL)),
            "groups[1].kind",
            "SLIDING",
            "FULL",
        ),
        (with_group(lambda g: replace(g, layers=9)), "groups[1].layers", "2", "9"),
        (with_group(lambda g: replace(g, window=64)), "groups[1].window", "128", "64"),
        (with_group(lambda g: replace(g, planes=g.planes[:2])), "groups[1].planes", "3", "2"),
        (
            with_plane(lambda p: replace(p, kind=PlaneKind.LATENT)),
            "groups[1].planes[1].kind",
            "V",
            "LATENT",
        ),
        (
            with_plane(lambda p: replace(p, dtype="float32")),
            "groups[1].planes[1].dtype",
            "bfloat16",
            "float32",
        ),
        (with_plane(lambda p: replace(p, heads=4)), "groups[1].planes[1].heads", "2", "4"),
        (with_plane(lambda p: replace(p, head_dim=5)), "groups[1].planes[1].head_dim", "4", "5"),
    ],
)
def test_f57_f58_each_field_that_differs_is_named_with_both_values(
    theirs: KvLayout, field: str, ours_shown: str, theirs_shown: str
) -> None:
    assert LAYOUT.differences(theirs) == [Mismatch(field, ours_shown, theirs_shown)]
    assert theirs.differences(LAYOUT) == [Mismatch(field, theirs_shown, ours_shown)]


def test_formats_that_differ_are_no_difference() -> None:
    """The ends convert between them."""
    assert LAYOUT.differences(replace(LAYOUT, format="vllm-cpu-amx")) == []


def test_every_field_that_differs_is_named_in_reading_order() -> None:
    theirs = replace(with_plane(lambda p: replace(p, heads=4, dtype="float32")), block_size=8)
    fields = [mismatch.field for mismatch in LAYOUT.differences(theirs)]
    assert fields == ["block_size", "groups[1].planes[1].dtype", "groups[1].planes[1].heads"]


@given(layouts)
def test_equal_layouts_do_not_differ(layout: KvLayout) -> None:
    assert layout.differences(replace(layout)) == []


@given(layouts, layouts)
def test_layouts_differ_exactly_when_they_are_unequal(a: KvLayout, b: KvLayout) -> None:
    assert (a.differences(b) == []) == (a == b)
