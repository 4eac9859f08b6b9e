"""The block pool: what is taken comes back, and every block counts exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from pd_grpc.blocks.pool import (
    BlockPool,
    BlockState,
    Holding,
    HoldingReleased,
    NoBlocks,
    PoolCorrupt,
)

HELD = [state for state in BlockState if state > BlockState.CACHED]


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    """A pool of eight that must have everything back at the end."""
    pool = BlockPool(8)
    yield pool
    pool.check()
    for holding in pool.holdings():
        holding.release()
    pool.check()
    counts = pool.counts()
    assert counts[BlockState.FREE] + counts[BlockState.CACHED] == pool.total == pool.free


def only(**counts: int) -> dict[BlockState, int]:
    """Counts with the states not named at zero."""
    return {state: counts.get(state.name.lower(), 0) for state in BlockState}


def test_a_reserved_block_counts_in_the_state_it_is_moved_to(pool: BlockPool) -> None:
    holding = pool.reserve(3, owner="r1")
    assert pool.counts() == only(free=5, reserved=3)
    for state in HELD:
        holding.move(state)
        assert holding.state is state
        assert pool.counts() == only(free=5, **{state.name.lower(): 3})
        pool.check()


def test_nothing_is_taken_when_there_are_too_few(pool: BlockPool) -> None:
    holding = pool.reserve(6)
    with pytest.raises(NoBlocks) as refused:
        pool.reserve(3)
    assert (refused.value.free, refused.value.needed) == (2, 3)
    with pytest.raises(NoBlocks):
        holding.grow(3)
    assert len(holding.blocks) == 6
    assert pool.counts() == only(free=2, reserved=6)
    holding.grow(2)
    assert sorted(holding.blocks) == list(range(8))


def test_no_blocks_at_all_can_be_held_and_grown(pool: BlockPool) -> None:
    holding = pool.reserve(0, BlockState.DECODING)
    assert holding.blocks == []
    holding.grow()
    assert pool.counts() == only(free=7, decoding=1)


def test_growth_appends_so_that_the_logical_order_stays(pool: BlockPool) -> None:
    holding = pool.reserve(2)
    before = list(holding.blocks)
    holding.grow(3)
    assert holding.blocks[:2] == before
    assert len(set(holding.blocks)) == 5


def test_the_block_freed_first_is_used_first(pool: BlockPool) -> None:
    first, second = pool.reserve(4), pool.reserve(4)
    freed = list(second.blocks) + list(first.blocks)
    second.release()
    first.release()
    assert pool.reserve(8).blocks == freed


def test_a_second_release_is_an_error_and_frees_nothing_of_the_next_owner(
    pool: BlockPool,
) -> None:
    holding = pool.reserve(8, owner="r1")
    holding.release()
    successor = pool.reserve(8, owner="r2")
    for late in (holding.release, holding.grow, holding.quarantine):
        with pytest.raises(HoldingReleased, match="r1"):
            late()
    assert holding.released and holding.blocks == []
    assert len(successor.blocks) == 8
    assert pool.free == 0


def test_quarantine_ends_only_by_release(pool: BlockPool) -> None:
    holding = pool.reserve(2, BlockState.RECEIVING, owner="r1")
    holding.quarantine()
    holding.quarantine()
    assert pool.counts() == only(free=6, quarantined=2)
    with pytest.raises(ValueError, match=r"r1.*DECODING"):
        holding.move(BlockState.DECODING)
    with pytest.raises(ValueError, match="cannot grow"):
        holding.grow()
    with pytest.raises(NoBlocks):
        pool.reserve(7)
    holding.release()
    assert pool.free == 8


@pytest.mark.parametrize("state", [BlockState.FREE, BlockState.CACHED])
def test_a_held_block_is_neither_free_nor_cached(pool: BlockPool, state: BlockState) -> None:
    holding = pool.reserve(1)
    with pytest.raises(ValueError, match="state"):
        holding.move(state)
    with pytest.raises(ValueError, match="state"):
        pool.reserve(1, state)
    with pytest.raises(ValueError, match="state"):
        pool.share(holding.blocks, state)
    assert pool.counts() == only(free=7, reserved=1)


@pytest.mark.parametrize("advanced", HELD)
@pytest.mark.parametrize("other", HELD)
def test_a_shared_block_counts_once_in_its_most_advanced_holders_state(
    pool: BlockPool, advanced: BlockState, other: BlockState
) -> None:
    first = pool.reserve(2, other)
    second = pool.share(first.blocks[:1], advanced)
    highest = max(other, advanced)
    expected = only(free=6)
    expected[other] += 1
    expected[highest] += 1
    assert pool.counts() == expected
    pool.check()
    first.release()
    assert pool.counts() == only(free=7, **{advanced.name.lower(): 1})
    assert len(second.blocks) == 1


def test_a_shared_block_stays_until_its_last_holder_releases_it(pool: BlockPool) -> None:
    first = pool.reserve(3)
    second = pool.share(first.blocks)
    first.release()
    assert pool.free == 5
    second.release()
    assert pool.free == 8


def test_what_cannot_be_shared_is_refused_and_changes_nothing(pool: BlockPool) -> None:
    holding = pool.reserve(2)
    held = holding.blocks[0]
    for blocks, message in (([7], "free"), ([held, held], "twice"), ([held, 8], "outside")):
        with pytest.raises(ValueError, match=message):
            pool.share(blocks)
        with pytest.raises(ValueError, match=message):
            pool.keep(blocks)
    with pytest.raises(ValueError, match="outside"):
        pool.share([-1])
    assert pool.holdings() == [holding]


def test_kept_blocks_are_cached_and_can_be_shared_again(pool: BlockPool) -> None:
    holding = pool.reserve(3)
    kept = holding.blocks[:2]
    pool.keep(kept)
    holding.release()
    assert pool.counts() == only(free=6, cached=2)
    assert pool.free == 8
    pool.check()
    hit = pool.share(kept, BlockState.DECODING)
    assert pool.counts() == only(free=6, decoding=2)
    assert pool.free == 6
    hit.release()
    assert pool.counts() == only(free=6, cached=2)


def test_blocks_that_are_kept_no_more_are_free_after_their_last_holder(pool: BlockPool) -> None:
    evicted: list[int] = []
    pool.keep_at_most(8, evicted.append)
    holding, gone = pool.reserve(3), pool.reserve(2)
    held, cached = list(holding.blocks), list(gone.blocks)
    pool.keep(held + cached)
    gone.release()
    other = pool.share(held[:1])
    pool.keep_no_more(held[:2] + cached[:1])
    assert pool.counts() == only(free=4, cached=1, reserved=3)
    holding.release()
    assert pool.counts() == only(free=5, cached=2, reserved=1)
    other.release()
    assert pool.counts() == only(free=6, cached=2)
    assert pool.kept() == {held[2], cached[1]} and not evicted
    taken = pool.reserve(1).blocks
    with pytest.raises(ValueError, match="not kept"):
        pool.keep_no_more([held[2], *taken])
    assert pool.kept() == {held[2], cached[1]}


def test_cached_blocks_are_evicted_only_when_none_is_free_and_oldest_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    old, new = pool.reserve(1), pool.reserve(1)
    old_block, new_block = old.blocks[0], new.blocks[0]
    pool.keep([old_block, new_block])
    old.release()
    new.release()
    assert set(pool.reserve(2).blocks).isdisjoint({old_block, new_block})
    assert evicted == []
    taken = pool.reserve(1)
    assert taken.blocks == evicted == [old_block]
    taken.release()
    assert pool.counts() == only(free=1, cached=1, reserved=2)
    pool.check()


def test_of_one_holder_the_last_block_is_evicted_first(pool: BlockPool) -> None:
    holding = pool.reserve(8)
    blocks = list(holding.blocks)
    pool.keep(blocks)
    holding.release()
    assert pool.reserve(3).blocks == [blocks[7], blocks[6], blocks[5]]


def test_beyond_the_bound_what_was_cached_longest_is_freed() -> None:
    evicted: list[int] = []
    pool = BlockPool(6)
    pool.keep_at_most(2, evicted.append)
    first, second = pool.reserve(2), pool.reserve(2)
    old, new = list(first.blocks), list(second.blocks)
    pool.keep(old + new)
    first.release()
    assert pool.counts() == only(free=2, cached=2, reserved=2)
    second.release()
    assert evicted == [old[1], old[0]]
    assert pool.counts() == only(free=4, cached=2)
    pool.keep_at_most(1, evicted.append)
    assert evicted == [old[1], old[0], new[1]]
    pool.check()


@pytest.mark.parametrize("total", [0, -1])
def test_a_pool_without_blocks_is_refused(total: int) -> None:
    with pytest.raises(ValueError, match="total"):
        BlockPool(total)


def test_a_negative_number_of_blocks_is_refused(pool: BlockPool) -> None:
    with pytest.raises(ValueError, match="-1"):
        pool.reserve(-1)
    assert pool.holdings() == []


def _free_a_held_block(pool: BlockPool, holding: Holding) -> None:
    pool._free.append(holding.blocks[0])


def _free_a_block_twice(pool: BlockPool, holding: Holding) -> None:
    pool._free.append(pool._free[0])


def _lose_a_block(pool: BlockPool, holding: Holding) -> None:
    pool._free.pop()


def _hold_a_block_behind_the_pools_back(pool: BlockPool, holding: Holding) -> None:
    holding.blocks.append(pool._free[0])


def _miscount(pool: BlockPool, holding: Holding) -> None:
    pool._counts[BlockState.FREE] -= 1


@pytest.mark.parametrize(
    "damage",
    [
        _free_a_held_block,
        _free_a_block_twice,
        _lose_a_block,
        _hold_a_block_behind_the_pools_back,
        _miscount,
    ],
)
def test_the_check_finds_damaged_accounts(
    damage: Callable[[BlockPool, Holding], None],
) -> None:
    pool = BlockPool(4)
    holding = pool.reserve(2)
    pool.check()
    damage(pool, holding)
    with pytest.raises(PoolCorrupt, match="block"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random calls on a pool beside a model that keeps, per holding, its blocks and its state."""

    TOTAL = 7

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(self.TOTAL, on_evict=self.evicted.append)
        self.model: dict[Holding, tuple[list[int], BlockState]] = {}
        self.free = list(range(self.TOTAL))
        self.cached: list[int] = []
        self.kept: set[int] = set()

    holdings = Bundle("holdings")

    def take(self, n: int) -> list[int]:
        taken = []
        for _ in range(n):
            if self.free:
                taken.append(self.free.pop(0))
            else:
                block = self.cached.pop(0)
                self.kept.remove(block)
                assert self.evicted.pop(0) == block
                taken.append(block)
        assert self.evicted == []
        return taken

    @rule(target=holdings, n=st.integers(0, 8), state=st.sampled_from(HELD))
    def reserve(self, n: int, state: BlockState) -> Holding | MultipleResults[Holding]:
        room = len(self.free) + len(self.cached)
        if n > room:
            with pytest.raises(NoBlocks):
                self.pool.reserve(n, state)
            return multiple()
        holding = self.pool.reserve(n, state)
        self.model[holding] = (self.take(n), state)
        return holding

    @rule(holding=holdings, n=st.integers(0, 3))
    def grow(self, holding: Holding, n: int) -> None:
        blocks, state = self.model[holding]
        if state is BlockState.QUARANTINED:
            with pytest.raises(ValueError):
                holding.grow(n)
        elif n > len(self.free) + len(self.cached):
            with pytest.raises(NoBlocks):
                holding.grow(n)
        else:
            holding.grow(n)
            blocks += self.take(n)

    @rule(holding=holdings, state=st.sampled_from(HELD))
    def move(self, holding: Holding, state: BlockState) -> None:
        blocks, old = self.model[holding]
        if old is BlockState.QUARANTINED and state is not old:
            with pytest.raises(ValueError):
                holding.move(state)
        else:
            holding.move(state)
            self.model[holding] = (blocks, state)

    @rule(
        target=holdings,
        blocks=st.lists(st.integers(0, TOTAL - 1), unique=True, max_size=4),
        state=st.sampled_from(HELD),
    )
    def share(self, blocks: list[int], state: BlockState) -> Holding | MultipleResults[Holding]:
        if set(blocks) & set(self.free):
            with pytest.raises(ValueError):
                self.pool.share(blocks, state)
            return multiple()
        holding = self.pool.share(blocks, state)
        self.cached = [block for block in self.cached if block not in blocks]
        self.model[holding] = (list(blocks), state)
        return holding

    @rule(holding=holdings, count=st.integers(1, 3))
    def keep(self, holding: Holding, count: int) -> None:
        blocks = self.model[holding][0][:count]
        self.pool.keep(blocks)
        self.kept.update(blocks)

    @rule(data=st.data())
    def keep_no_more(self, data: st.DataObject) -> None:
        if not self.kept:
            return
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True))
        self.pool.keep_no_more(blocks)
        self.kept.difference_update(blocks)
        self.free += [block for block in blocks if block in self.cached]
        self.cached = [block for block in self.cached if block not in blocks]

    @rule(holding=consumes(holdings))
    def release(self, holding: Holding) -> None:
        blocks, _ = self.model.pop(holding)
        holding.release()
        still = {block for held, _ in self.model.values() for block in held}
        gone = [block for block in blocks if block not in still]
        self.free += [block for block in gone if block not in self.kept]
        self.cached += [block for block in reversed(gone) if block in self.kept]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.free == len(self.free) + len(self.cached)
        assert set(self.pool.holdings()) == set(self.model)
        expected = dict.fromkeys(BlockState, 0)
        expected[BlockState.FREE] = len(self.free)
        expected[BlockState.CACHED] = len(self.cached)
        classes: dict[int, BlockState] = {}
        for holding, (blocks, state) in self.model.items():
            assert (holding.blocks, holding.state) == (blocks, state)
            for block in blocks:
                classes[block] = max(state, classes.get(block, state))
        for state in classes.values():
            expected[state] += 1
        assert self.pool.counts() == expected
        assert sum(expected.values()) == self.TOTAL

    def teardown(self) -> None:
        for holding in list(self.model):
            self.release(holding)
        self.pool.check()
        assert self.pool.free == self.TOTAL


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_holding_is_split_without_a_block_changing_its_class(pool: BlockPool) -> None:
    holding = pool.reserve(4, BlockState.DECODING, "r")
    blocks = list(holding.blocks)
    before = pool.counts()
    first = holding.split(3)
    assert (first.blocks, holding.blocks) == (blocks[:3], blocks[3:])
    assert (first.owner, first.state) == ("r", BlockState.DECODING)
    assert pool.counts() == before
    pool.check()
    holding.quarantine()
    pool.check()
    assert [pool.state_of(b).name for b in blocks] == ["DECODING"] * 3 + ["QUARANTINED"]
    with pytest.raises(ValueError, match="has 3 blocks, not 4"):
        first.split(4)
    nothing = first.split(0)
    for each in (nothing, first, holding):
        each.release()
    with pytest.raises(HoldingReleased):
        first.split(0)
    pool.check()
    assert pool.free == pool.total
