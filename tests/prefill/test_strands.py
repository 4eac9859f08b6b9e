"""Which shard of P sends what to which shard of D."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.prefill.strands import Strand, plan_strands
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.shards import NOTHING, Part, Place, cut


def layout(layers: int, heads: int) -> KvLayout:
    """One group."""
    planes = tuple(Plane(kind, "uint8", heads, 16) for kind in (PlaneKind.K, PlaneKind.V))
    return KvLayout("m", "p", 4, (KvGroup(GroupKind.FULL, layers, planes),))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """P and D, each cut in its own way."""
    layers, heads = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    shape = layout(layers, heads)
    sizes = [n for n in range(1, 17) if not (heads % n and n % heads)]
    p, d = (
        cut(shape, draw(st.sampled_from(sizes)), draw(st.integers(1, layers))) for _ in range(2)
    )
    return draw(st.permutations(p).map(tuple)), draw(st.permutations(d).map(tuple))


@given(pairs())
def test_f32_every_head_of_every_layer_goes_once_to_each_shard_that_holds_it(
    both: tuple[tuple[Place, ...], tuple[Place, ...]],
) -> None:
    senders, receivers = both
    strands = plan_strands(senders, receivers)
    for r, receiver in enumerate(receivers):
        came: Counter[tuple[int, int]] = Counter()
        for strand in (each for each in strands if each.receiver == r):
            assert strand.part.within(senders[strand.sender].part) or strand.part is NOTHING
            came.update(_cells(strand.part))
        assert set(came) == set(_cells(receiver.part))
        assert set(came.values()) == {1}


@given(pairs())
def test_a_stream_for_each_pair_with_something_in_common(
    both: tuple[tuple[Place, ...], tuple[Place, ...]],
) -> None:
    senders, receivers = both
    strands = plan_strands(senders, receivers)
    in_common = {
        (s, r)
        for s, sender in enumerate(senders)
        for r, receiver in enumerate(receivers)
        if sender.part.common(receiver.part).area
    }
    assert len(strands) == len(in_common)
    assert {(each.sender, each.receiver) for each in strands} == in_common


def test_those_that_hold_the_same_take_turns() -> None:
    shape = layout(2, 2)
    strands = plan_strands(cut(shape, 4, 1), cut(shape, 4, 1))
    sent = [(each.sender, each.receiver) for each in strands if each.part is not NOTHING]
    assert sent == [(0, 0), (1, 1), (2, 2), (3, 3)]
    idle = [(each.sender, each.receiver) for each in strands if each.part is NOTHING]
    assert idle == [(1, 0), (0, 1), (3, 2), (2, 3)]


def test_unequal_runs_of_layers() -> None:
    shape = layout(5, 1)
    assert plan_strands(cut(shape, 1, 2), cut(shape, 1, 2)[::-1]) == (
        Strand(1, 0, Part(2, 3, 0, 1)),
        Strand(0, 1, Part(0, 2, 0, 1)),
    )
    assert plan_strands(cut(shape, 1, 2), cut(shape, 1, 3)) == (
        Strand(0, 0, Part(0, 1, 0, 1)),
        Strand(0, 1, Part(1, 1, 0, 1)),
        Strand(1, 1, Part(2, 1, 0, 1)),
        Strand(1, 2, Part(3, 2, 0, 1)),
    )


def _cells(part: Part) -> list[tuple[int, int]]:
    layers = range(part.layer, part.layer + part.layers)
    return [(layer, head) for layer in layers for head in range(part.head, part.head + part.heads)]
