"""How instances are cut, and which cuts fit a layout."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.shards import (
    MAX_SHARDS,
    NOTHING,
    Part,
    Place,
    cut,
    heads_of,
    place_of,
    places_of,
    shards_problem,
    whole,
)
from pd_grpc.v1 import layout_pb2

Shard = layout_pb2.Shard


def layout(layers: tuple[int, ...] = (3, 2), heads: int = 4) -> KvLayout:
    """Groups of so many layers, planes K and V."""
    planes = tuple(Plane(kind, "float16", heads, 8) for kind in (PlaneKind.K, PlaneKind.V))
    groups = tuple(KvGroup(GroupKind.FULL, n, planes) for n in layers)
    return KvLayout("m", "p", 4, groups)


def test_parts_in_common() -> None:
    a = Part(1, 3, 0, 4)
    assert a.common(Part(2, 5, 2, 4)) == Part(2, 2, 2, 2)
    assert a.common(Part(4, 1, 0, 4)) == NOTHING == a.common(Part(1, 3, 4, 1))
    assert Part(2, 1, 1, 1).within(a) and not Part(0, 2, 0, 1).within(a)


def test_a_part_counts_layers_over_all_groups() -> None:
    assert Part(1, 3, 0, 2).runs(layout()) == [(0, 1, 2), (1, 0, 1)]
    assert Part(3, 2, 0, 2).runs(layout()) == [(1, 0, 2)]
    assert NOTHING.runs(layout()) == []
    assert Part(1, 3, 0, 1).block_bytes(layout()) * 4 == 3 * layout().layer_bytes(0)


def test_planes_of_unlike_heads_cannot_be_cut() -> None:
    odd = layout()
    group = odd.groups[0]
    scale = Plane(PlaneKind.K, "float32", 1, 1)
    odd = KvLayout("m", "p", 4, (KvGroup(group.kind, 2, (*group.planes, scale)),))
    assert heads_of(odd) == 1
    halves = [Shard(tp_rank=r, tp_size=2, head_start=2 * r, head_count=2) for r in range(2)]
    problem = shards_problem(halves, odd)
    assert problem is not None and problem.field == "shards[0].head_count"
    stages = [Shard(pp_rank=r, pp_size=2, layer_start=r, layer_count=1) for r in range(2)]
    assert shards_problem(stages, odd) is None


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_what_is_cut_fits_and_survives_the_wire(layers: int, heads: int, tp: int, pp: int) -> None:
    shape = layout((layers, 2), heads)
    if pp > layers + 2 or (heads % tp and tp % heads):
        with pytest.raises(ValueError, match=r"^(tp|pp): "):
            cut(shape, tp, pp)
        return
    places = cut(shape, tp, pp)
    shards = [place.to_proto() for place in places]
    assert shards_problem(shards, shape) is None
    assert places_of(shards, shape) == places
    distinct = {place.part for place in places}
    assert sum(part.area for part in distinct) == whole(shape).area


def test_without_shards_there_is_one_that_has_everything() -> None:
    assert places_of([], layout()) == (Place(Part(0, 5, 0, 4)),) == places_of([Shard()], layout())
    assert place_of(Shard(layer_start=2, head_start=1), layout()).part == Part(2, 3, 1, 3)


def tp(rank: int, size: int, **fields: Any) -> layout_pb2.Shard:
    """A tensor-parallel shard."""
    return Shard(tp_rank=rank, tp_size=size, **fields)


@pytest.mark.parametrize(
    ("shards", "field", "ours", "theirs"),
    [
        ([Shard(), Shard()], "shards", "1", "2"),
        ([tp(0, 2)], "shards", "2", "1"),
        (
            [tp(0, 2), tp(0, 2)],
            "shards[1].tp_rank",
            "each pair of ranks once",
            "tp 0 of 2, pp 0 of 1",
        ),
        ([tp(0, 2), tp(2, 2)], "shards[1].tp_rank", "below 2", "2"),
        ([tp(0, 2), tp(1, 4)], "shards[1].tp_size", "2", "4"),
        ([Shard(pp_rank=1)], "shards[0].pp_rank", "below 1", "1"),
        ([Shard(cp_size=2)], "shards[0].cp_size", "1", "2"),
        ([Shard(dp_rank=1)], "shards[0].dp_rank", "0", "1"),
        ([Shard(layer_start=5)], "shards[0].layer_start", "below 5", "5"),
        ([Shard(head_start=1, head_count=4)], "shards[0].head_count", "[0, 4)", "[1, 5)"),
        ([Shard(head_count=3)], "shards[0].head_count", "4", "3"),
        ([Shard(layer_start=1)], "shards[0].layer_start", "0", "1"),
        (
            [tp(0, 2, head_count=2), tp(1, 2, head_start=1, head_count=2)],
            "shards[1].head_start",
            "0",
            "1",
        ),
        (
            [tp(0, 2, layer_count=3), tp(1, 2, layer_start=2)],
            "shards[1].layer_start",
            "0",
            "2",
        ),
        (
            [tp(0, 2, head_count=2), tp(1, 2, head_count=2)],
            "shards",
            "20 heads of layers held",
            "10 held",
        ),
        ([Shard()] * (MAX_SHARDS + 1), "shards", f"at most {MAX_SHARDS}", str(MAX_SHARDS + 1)),
    ],
)
def test_f59_shards_that_do_not_fit_are_named(
    shards: list[layout_pb2.Shard], field: str, ours: str, theirs: str
) -> None:
    problem = shards_problem(shards, layout())
    assert problem is not None
    assert (problem.field, problem.ours, problem.theirs) == (field, ours, theirs)
