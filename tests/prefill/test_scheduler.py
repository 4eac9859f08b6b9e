"""What the engine computes next, as rules alone."""

from __future__ import annotations

from itertools import count

from pd_grpc.blocks.pool import BlockPool, BlockState
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.prefill.scheduler import Plan, PrefillScheduler
from pd_grpc.prefill.states import PrefillRecord, Times
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import prefill_pb2
from tests.prefill.world import LAYOUT

_numbers = count()


def record(tokens: int, decode: str = "d") -> PrefillRecord:
    return PrefillRecord(
        key=TransferKey(f"t-{next(_numbers)}", 1),
        call=0,
        request=prefill_pb2.PrefillRequest(decodes=[prefill_pb2.DecodeTarget(endpoint=decode)]),
        sampling=Sampling(max_tokens=4),
        tokens=tuple(range(tokens)),
        chain=BlockChain(LAYOUT.block_size),
        deadline=0,
        times=Times(0),
    )


class Bench:
    """A scheduler of chunks of 8 tokens, whose steps the test computes."""

    def __init__(self, blocks: int = 100, batch: int = 4, cut: int = 8) -> None:
        self.pool = BlockPool(blocks)
        cache = PrefixCache(self.pool, 0.0)
        self.scheduler = PrefillScheduler(cache, LAYOUT, batch, chunk_tokens=8, cut=cut)
        self.records: list[PrefillRecord] = []

    def add(self, *tokens: int, decode: str = "d") -> list[PrefillRecord]:
        added = [record(n, decode) for n in tokens]
        for each in added:
            self.scheduler.add(each)
        self.records += added
        return added

    def step(self) -> list[tuple[int, int, int]]:
        """Compute the next step: (index of the request, first token, tokens) of each chunk."""
        plan = self.scheduler.plan()
        return [] if plan is None else self.compute(plan)

    def compute(self, plan: Plan) -> list[tuple[int, int, int]]:
        done = []
        for each, chunk in zip(plan.records, plan.chunks, strict=True):
            done.append((self.records.index(each), chunk.start, len(chunk.token_ids)))
            each.computed += len(chunk.token_ids)
            if chunk.sample is not None:
                self.scheduler.remove(each)
                assert each.holding is not None
                each.holding.release()
        return done

    def idle(self) -> bool:
        self.pool.check()
        return self.pool.free == self.pool.total


def test_the_oldest_goes_first_and_chunks_are_its_own() -> None:
    bench = Bench()
    bench.add(20, 20)
    steps = [bench.step() for _ in range(6)]
    assert steps[0] == [(0, 0, 8)] and steps[1] == [(0, 8, 8)]
    # The last chunk of the first leaves room, but not for a whole chunk of the second.
    assert steps[2] == [(0, 16, 4)]
    assert steps[3:] == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 4)]]
    assert bench.idle()


def test_short_prompts_share_a_step() -> None:
    bench = Bench()
    bench.add(3, 2, 3, 5)
    assert bench.step() == [(0, 0, 3), (1, 0, 2), (2, 0, 3)]
    assert bench.step() == [(3, 0, 5)]
    assert bench.step() == []
    assert bench.idle()


def test_company_does_not_move_the_cuts() -> None:
    alone, together = Bench(), Bench()
    alone.add(21)
    together.add(3, 21, 6)
    cuts_alone = [chunk for _ in range(3) for chunk in alone.step()]
    cuts = [chunk for _ in range(8) for chunk in together.step() if chunk[0] == 1]
    assert [c[1:] for c in cuts] == [c[1:] for c in cuts_alone] == [(0, 8), (8, 8), (16, 5)]


def test_the_rest_of_a_step_begins_the_next_prompt() -> None:
    bench = Bench(cut=2)
    bench.add(11, 11)
    assert bench.step() == [(0, 0, 8)]
    assert bench.step() == [(0, 8, 3), (1, 0, 4)]
    assert bench.step() == [(1, 4, 7)]
    assert bench.idle()


def test_a_short_prompt_does_not_wait_for_a_long_one_that_is_being_computed() -> None:
    bench = Bench(cut=2)
    bench.add(40)
    assert bench.step() == [(0, 0, 8)]
    bench.add(2, 3)
    assert bench.step() == [(0, 8, 6), (1, 0, 2)]
    assert bench.step() == [(0, 14, 6), (2, 0, 2)]
    assert bench.step() == [(0, 20, 6), (2, 2, 1)]
    assert bench.step() == [(0, 26, 8)]
    assert bench.step() == [(0, 34, 6)]
    assert bench.idle()


def test_one_that_is_hardly_shorter_holds_no_blocks_while_it_waits() -> None:
    bench = Bench(cut=2)
    bench.add(24)
    assert bench.step() == [(0, 0, 8)]
    (second,) = bench.add(12)
    assert bench.step() == [(0, 8, 8)]
    assert second.holding is None
    assert bench.step() == [(0, 16, 8)]
    assert bench.step() == [(1, 0, 8)]
    assert bench.step() == [(1, 8, 4)]
    assert bench.idle()


def test_a_beginning_that_is_cached_counts_for_nothing() -> None:
    bench = Bench(cut=2)
    cache = PrefixCache(bench.pool, 1.0)
    bench.scheduler = PrefillScheduler(cache, LAYOUT, 4, chunk_tokens=8, cut=2)
    first = bench.add(20)
    while bench.step():
        bench.scheduler.keep(first[0])
    bench.add(8, 20)
    assert bench.step() == [(1, 4, 4), (2, 16, 4)], "all but the block of the last token"
    assert bench.idle()


def test_no_more_than_the_batch_at_once() -> None:
    bench = Bench(batch=2)
    bench.add(1, 1, 1)
    assert bench.step() == [(0, 0, 1), (1, 0, 1)]
    assert bench.step() == [(2, 0, 1)]


def test_a_request_that_does_not_fit_waits_and_none_overtakes_it() -> None:
    bench = Bench(blocks=4)
    first, second, third = bench.add(12, 16, 1)
    assert bench.step() == [(0, 0, 8)]
    assert second.holding is None and third.holding is None
    assert bench.step() == [(0, 8, 4)]
    assert first.holding is not None and first.holding.released
    assert bench.step() == [(1, 0, 8)]
    assert bench.step() == [(1, 8, 8)]
    assert bench.step() == [(2, 0, 1)]
    assert bench.idle()


def test_a_decode_that_keeps_its_share_of_blocks_busy_is_overtaken_by_another() -> None:
    """S2, invariant 8: eight requests for a slow D leave room for one for a free D."""
    bench = Bench(blocks=12, batch=8)
    slow = bench.add(*[8] * 8, decode="slow")
    plans = 0
    while (plan := bench.scheduler.plan()) is not None:
        plans += 1
        for each, chunk in zip(plan.records, plan.chunks, strict=True):
            each.computed += len(chunk.token_ids)
            bench.scheduler.remove(each)  # computed, and its KV is never taken
    held = [each for each in slow if each.holding is not None]
    assert 0 < len(held) < len(slow) and bench.pool.free >= 4
    (free,) = bench.add(8, decode="free")
    assert bench.step() == [(8, 0, 8)] and free.computed == 8
    assert bench.scheduler.plan() is None, "the slow D has used up its share"
    held[0].holding.release()  # type: ignore[union-attr]
    assert bench.step() == [(len(held), 0, 8)], "in order among its own"
    for each in slow:
        if each.holding is not None and not each.holding.released:
            each.holding.release()
    while bench.step():
        pass
    bench.pool.check()
    assert bench.pool.free == bench.pool.total


def test_grants_that_come_all_at_once_stand_in_no_other_decodes_way() -> None:
    """S1: a D that is slow to answer has granted ten; the others' turn comes in the same step."""
    bench = Bench(batch=4)
    bench.add(*[1] * 10, decode="slow")
    bench.add(1, 1, decode="b")
    bench.add(1, decode="c")
    assert [index for index, _, _ in bench.step()] == [0, 10, 12, 1]
    assert [index for index, _, _ in bench.step()] == [11, 2, 3, 4]
    assert [index for index, _, _ in bench.step()] == [5, 6, 7, 8]
    assert [index for index, _, _ in bench.step()] == [9]
    assert bench.idle()


def test_a_decode_whose_turn_it_is_waits_for_room_and_none_overtakes_it() -> None:
    bench = Bench(blocks=8)
    somebody = bench.pool.reserve(4, BlockState.COMPUTING, "somebody else")
    bench.add(4, decode="a")
    bench.add(16, decode="b")
    bench.add(4, 4, decode="c")
    assert bench.step() == [(0, 0, 4)]
    assert bench.step() == [(1, 0, 8)]
    assert bench.step() == [(1, 8, 8)]
    assert bench.step() == [(2, 0, 4), (3, 0, 4)]
    somebody.release()
    assert bench.idle()


def test_a_request_larger_than_a_share_is_computed_when_its_decode_holds_nothing() -> None:
    bench = Bench(blocks=4)
    bench.add(16)
    assert bench.step() == [(0, 0, 8)]
    assert bench.step() == [(0, 8, 8)]
    assert bench.idle()


def test_suspects_are_computed_alone() -> None:
    bench = Bench()
    bench.add(2, 2, 2)
    plan = bench.scheduler.plan()
    assert plan is not None and len(plan.records) == 3
    bench.scheduler.suspect(plan.records[:2])
    assert bench.step() == [(0, 0, 2)]
    assert bench.step() == [(1, 0, 2)]
    assert bench.step() == [(2, 0, 2)]


def test_a_request_that_is_removed_is_not_computed() -> None:
    bench = Bench()
    first, second = bench.add(20, 4)
    bench.step()
    bench.scheduler.remove(first)
    bench.scheduler.remove(second)
    assert bench.step() == []
    assert first.holding is not None
    first.holding.release()
    assert bench.idle()
