"""What of a request's KV is sent when, as rules alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_grpc.prefill.sender import TransferSender
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.transport.base import LayerRun, SendPlan, Slab

BLOCK = 4
LAYER_BYTES = 32 * BLOCK
"""Of one block in one layer."""


def layout(*layers: int) -> KvLayout:
    planes = (Plane(PlaneKind.K, "uint8", 1, 16), Plane(PlaneKind.V, "uint8", 1, 16))
    groups = tuple(KvGroup(GroupKind.FULL, count, planes) for count in layers)
    return KvLayout("m", "p", BLOCK, groups)


def sender(
    tokens: int = 16,
    wanted: Sequence[tuple[int, int]] = ((0, 4),),
    layers: int = 2,
    chunk_blocks: int = 100,
) -> TransferSender:
    """One whose chunks hold `chunk_blocks` block-layers, and whose stream is not open."""
    plan = SendPlan(tokens, tuple(range(64)), tuple(wanted), (LayerRun(0, 0, layers),))
    return TransferSender(layout(layers), plan, chunk_blocks * LAYER_BYTES, progress_s=10)


def opened(made: TransferSender, window_blocks: int = 1000, now: float = 0) -> TransferSender:
    made.opening(now)
    made.opened([], window_blocks * LAYER_BYTES, now)
    return made


def compute(made: TransferSender, tokens: int, layers: int = 2) -> None:
    """The engine finishes a pass up to `tokens`."""
    for layer in range(layers):
        made.advance(0, layer, tokens)


def drain(made: TransferSender, now: float = 0) -> list[Slab]:
    """Everything that can be sent now."""
    slabs = []
    while (slab := made.next_slab(now)) is not None:
        slabs.append(slab)
    return slabs


def test_nothing_is_sent_before_the_shard_has_answered() -> None:
    made = sender()
    made.opening(0)
    compute(made, 16)
    assert drain(made) == []
    made.opened([], 1 << 20, 0)
    assert drain(made) == [Slab(0, 0, 2, 0, 4)]


def test_a_block_is_sent_once_all_its_tokens_are_computed() -> None:
    made = opened(sender(tokens=14))
    compute(made, 7)
    assert drain(made) == [Slab(0, 0, 2, 0, 1)]
    compute(made, 12)
    assert drain(made) == [Slab(0, 0, 2, 1, 2)]
    compute(made, 14)
    assert drain(made) == [Slab(0, 0, 2, 3, 1)]


def test_a_layer_leaves_while_the_next_is_computed_once_it_fills_a_chunk() -> None:
    made = opened(sender(chunk_blocks=4))
    made.advance(0, 0, 16)
    assert drain(made) == [Slab(0, 0, 1, 0, 4)]
    assert made.end(0) is None
    made.advance(0, 1, 16)
    assert drain(made) == [Slab(0, 1, 1, 0, 4)]


def test_what_does_not_fill_a_chunk_waits_for_the_pass_to_end() -> None:
    made = opened(sender(layers=3, chunk_blocks=9))
    made.advance(0, 0, 16)
    made.advance(0, 1, 16)
    assert drain(made) == []
    made.advance(0, 2, 16)
    # All layers of a block together, for so they lie in memory.
    assert drain(made) == [Slab(0, 0, 3, 0, 3), Slab(0, 0, 3, 3, 1)]


def test_a_slab_may_be_larger_than_what_is_worth_being_sent() -> None:
    plan = SendPlan(16, tuple(range(64)), ((0, 4),), (LayerRun(0, 0, 3),))
    made = TransferSender(layout(3), plan, 4 * LAYER_BYTES, 10, slab_bytes=9 * LAYER_BYTES)
    made.opening(0)
    made.opened([], 1000 * LAYER_BYTES, 0)
    made.advance(0, 0, 16)
    assert drain(made) == [Slab(0, 0, 1, 0, 4)], "it does not wait for as much as could go at once"
    made.advance(0, 1, 16)
    made.advance(0, 2, 16)
    assert drain(made) == [Slab(0, 1, 2, 0, 4)]


def test_a_chunk_is_never_smaller_than_one_block_of_one_layer() -> None:
    plan = SendPlan(8, (0, 1), ((0, 2),), (LayerRun(0, 0, 1),))
    made = opened(TransferSender(layout(1), plan, chunk_bytes=1, progress_s=10))
    made.advance(0, 0, 8)
    assert drain(made) == [Slab(0, 0, 1, 0, 1), Slab(0, 0, 1, 1, 1)]


def test_only_wanted_blocks_are_sent_and_a_slab_has_no_hole() -> None:
    made = opened(sender(tokens=40, wanted=((1, 2), (5, 3))))
    compute(made, 40)
    assert drain(made) == [Slab(0, 0, 2, 1, 2), Slab(0, 0, 2, 5, 3)]
    assert made.end(0) == (2, 2 * 5 * LAYER_BYTES)


def test_a_slab_never_spans_two_groups() -> None:
    runs = (LayerRun(0, 0, 1), LayerRun(1, 0, 2))
    plan = SendPlan(4, (0,), ((0, 1),), runs)
    made = opened(TransferSender(layout(1, 2), plan, 1 << 20, 10))
    for group, layer in ((0, 0), (1, 0), (1, 1)):
        made.advance(group, layer, 4)
    assert drain(made) == [Slab(0, 0, 1, 0, 1), Slab(1, 0, 2, 0, 1)]


def test_a_shard_that_wants_nothing_is_told_so_once_all_is_computed() -> None:
    made = opened(sender(wanted=()))
    for tokens in (0, 8):
        compute(made, tokens)
        assert drain(made) == []
        assert made.end(0) is None, "the first token is not near yet"
        assert made.deadline() is None
    compute(made, 16)
    assert made.end(0) == (0, 0)
    assert made.end(0) is None


def test_nothing_wanted_of_the_end_waits_for_the_end_all_the_same() -> None:
    made = opened(sender(wanted=((0, 1),)))
    compute(made, 4)
    assert drain(made) == [Slab(0, 0, 2, 0, 1)]
    assert made.end(0) is None
    compute(made, 16)
    assert made.end(0) == (1, 2 * LAYER_BYTES)


def test_what_is_there_from_the_beginning_goes_before_anything_is_computed() -> None:
    plan = SendPlan(18, tuple(range(64)), ((1, 4),), (LayerRun(0, 0, 2),), ready=12)
    made = opened(TransferSender(layout(2), plan, 1 << 20, progress_s=10))
    assert drain(made) == [Slab(0, 0, 2, 1, 2)]
    assert made.end(0) is None
    compute(made, 18)
    assert drain(made) == [Slab(0, 0, 2, 3, 2)]
    assert made.end(0) == (2, 8 * LAYER_BYTES)


def test_no_more_than_the_window_is_unacknowledged() -> None:
    made = opened(sender(layers=1, chunk_blocks=1), window_blocks=2)
    compute(made, 16, layers=1)
    assert len(drain(made)) == 2
    made.acked([Slab(0, 0, 1, 0, 1)], LAYER_BYTES, 1)
    assert len(drain(made)) == 1
    assert made.end(1) is None
    made.acked([Slab(0, 0, 1, 1, 2)], 3 * LAYER_BYTES, 2)
    assert len(drain(made)) == 1
    assert made.end(2) == (4, 4 * LAYER_BYTES)
    assert made.acked_bytes == 3 * LAYER_BYTES


def test_a_window_smaller_than_a_chunk_makes_smaller_chunks() -> None:
    made = opened(sender(layers=1), window_blocks=2)
    compute(made, 16, layers=1)
    assert drain(made) == [Slab(0, 0, 1, 0, 2)]


def test_an_acknowledgement_that_was_lost_counts_once_the_shard_is_open_again() -> None:
    made = opened(sender(layers=1, chunk_blocks=1))
    compute(made, 16, layers=1)
    assert len(drain(made)) == 4
    made.acked([Slab(0, 0, 1, 0, 1)], LAYER_BYTES, 1)
    made.broken()
    made.opening(2)
    known, lost = Slab(0, 0, 1, 0, 1), Slab(0, 0, 1, 1, 2)
    assert made.opened([known, lost], 100 * LAYER_BYTES, 2) == [lost]
    assert made.acked_bytes == 3 * LAYER_BYTES


def test_after_a_break_only_what_d_lacks_is_sent_again() -> None:
    made = opened(sender(layers=1, chunk_blocks=1))
    compute(made, 16, layers=1)
    assert len(drain(made)) == 4
    made.acked([Slab(0, 0, 1, 0, 1)], LAYER_BYTES, 1)
    made.broken()
    assert drain(made) == []
    made.opening(2)
    made.opened([Slab(0, 0, 1, 0, 1), Slab(0, 0, 1, 2, 1)], 1 << 20, 2)
    assert drain(made) == [Slab(0, 0, 1, 1, 1), Slab(0, 0, 1, 3, 1)]
    assert made.end(2) == (2, 2 * LAYER_BYTES)


def test_the_shard_owes_an_answer_while_it_opens_has_chunks_or_the_end() -> None:
    made = sender(layers=1)
    assert made.deadline() is None
    made.opening(5)
    assert made.deadline() == 15
    made.opened([], 1 << 20, 6)
    assert made.deadline() is None
    compute(made, 16, layers=1)
    drain(made, now=20)
    assert made.deadline() == 30
    made.acked([Slab(0, 0, 1, 0, 4)], 4 * LAYER_BYTES, 22)
    assert made.deadline() is None
    made.end(40)
    assert made.deadline() == 50
    made.completed()
    assert made.deadline() is None


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    tokens=st.integers(1, 60),
    layers=st.integers(1, 4),
    chunk=st.integers(1, 12),
    window=st.integers(1, 12),
)
def test_every_wanted_block_of_every_layer_is_verified_once_and_nothing_else(
    seed: int, tokens: int, layers: int, chunk: int, window: int
) -> None:
    chance = random.Random(seed)
    blocks = -(-tokens // BLOCK)
    wanted = _runs([block for block in range(blocks) if chance.random() < 0.7])
    made = sender(tokens, wanted, layers, chunk)
    verified: set[tuple[int, int]] = set()
    made.opening(0)
    made.opened([], window * LAYER_BYTES, 0)
    passes = [*sorted(chance.randint(1, tokens) for _ in range(3)), tokens]
    steps = [(t, layer) for t in passes for layer in range(layers)]
    accepted, unacked = 0, 0
    for _ in range(10_000):
        slab = made.next_slab(0)
        if slab is not None:
            size = slab.layers * slab.blocks * LAYER_BYTES
            unacked += size
            assert unacked <= max(window * LAYER_BYTES, LAYER_BYTES)
            pieces = {
                (layer, block)
                for layer in range(slab.layer, slab.layer + slab.layers)
                for block in range(slab.block, slab.block + slab.blocks)
            }
            assert not pieces & verified
            if chance.random() < 0.1:
                made.broken()
                made.opening(0)
                done = [Slab(0, layer, 1, block, 1) for layer, block in verified]
                made.opened(done, window * LAYER_BYTES, 0)
                accepted = unacked = 0
                continue
            verified |= pieces
            accepted, unacked = accepted + size, unacked - size
            made.acked([slab], accepted, 0)
        elif steps:
            done_tokens, layer = steps.pop(0)
            made.advance(0, layer, done_tokens)
        else:
            break
    assert made.end(0) is not None
    assert verified == {
        (layer, start + i) for layer in range(layers) for start, n in wanted for i in range(n)
    }


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


def test_layers_of_another_shard_are_not_sent() -> None:
    plan = SendPlan(4, (0,), ((0, 1),), (LayerRun(0, 1, 1),))
    made = opened(TransferSender(layout(3), plan, 1 << 20, 10))
    for layer in range(3):
        made.advance(0, layer, 4)
    assert drain(made) == [Slab(0, 1, 1, 0, 1)]


@pytest.mark.parametrize("tokens", [4, 8])
def test_a_whole_number_of_blocks_has_no_last_one_to_wait_for(tokens: int) -> None:
    made = opened(sender(tokens, ((0, tokens // BLOCK),)))
    compute(made, tokens)
    assert drain(made) == [Slab(0, 0, 2, 0, tokens // BLOCK)]
