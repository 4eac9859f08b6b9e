"""The prefix cache over a pool: what is found is what was put there, and nobody loses a block."""

from __future__ import annotations

from collections.abc import Iterator

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

from pd_grpc.blocks.pool import BlockPool, BlockState, Holding, NoBlocks
from pd_grpc.blocks.prefix_cache import PrefixCache
from tests.blocks.emptying import assert_whole

STATE = BlockState.RESERVED


def chain(text: str) -> list[bytes]:
    """The names of the blocks of a prompt of which each letter is one: its beginnings."""
    return [text[: i + 1].encode() for i in range(len(text))]


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(8)
    yield pool
    pool.check()
    for holding in pool.holdings():
        holding.release()
    assert pool.free == pool.total


@pytest.fixture
def cache(pool: BlockPool) -> Iterator[PrefixCache]:
    """A cache that, once all is evicted, leaves every block free."""
    cache = PrefixCache(pool, 1.0)
    yield cache
    cache.check()
    for holding in pool.holdings():
        holding.release()
    cache.check()
    assert_whole(pool)
    cache.check()
    assert len(cache) == 0


def put(cache: PrefixCache, text: str) -> list[int]:
    """A request for `text` that has been here and is gone; its blocks."""
    holding, cached = cache.reserve(len(text), chain(text), STATE, text)
    blocks = list(holding.blocks)
    cache.add(chain(text), blocks, cached)
    holding.release()
    return blocks


def test_nothing_is_found_that_was_not_put_there(cache: PrefixCache) -> None:
    put(cache, "abc")
    assert cache.find(chain("xbc")) == []
    holding, cached = cache.reserve(3, chain("xbc"), STATE, "r")
    assert cached == 0 and len(holding.blocks) == 3


def test_the_longest_common_beginning_is_shared_and_the_rest_is_new(cache: PrefixCache) -> None:
    blocks = put(cache, "abcd")
    holding, cached = cache.reserve(5, chain("abxy"), STATE, "r")
    assert cached == 2
    assert holding.blocks[:2] == blocks[:2]
    assert not set(holding.blocks[2:]) & set(blocks)


def test_what_is_held_is_shared_by_any_number(cache: PrefixCache, pool: BlockPool) -> None:
    first, _ = cache.reserve(3, chain("abc"), STATE, "r1")
    cache.add(chain("abc"), first.blocks)
    for name in ("r2", "r3"):
        holding, cached = cache.reserve(4, chain("abc"), STATE, name)
        assert (cached, holding.blocks[:3]) == (3, first.blocks)
    assert pool.counts()[BlockState.FREE] == 8 - 3 - 2


def test_a_hit_stays_while_others_are_evicted(cache: PrefixCache, pool: BlockPool) -> None:
    put(cache, "abc")
    put(cache, "xyz")
    hit, cached = cache.reserve(3, chain("abc"), STATE, "r1")
    assert cached == 3
    rest = pool.reserve(5)
    assert not set(rest.blocks) & set(hit.blocks)
    assert cache.find(chain("xyz")) == []
    with pytest.raises(NoBlocks):
        pool.reserve(1)
    assert cache.find(chain("abc")) == hit.blocks


def test_cached_blocks_that_are_hit_are_no_room_for_the_rest(
    cache: PrefixCache, pool: BlockPool
) -> None:
    put(cache, "abcd")
    held = pool.reserve(4)
    assert pool.free == 4
    assert not cache.has_room(5, chain("abcd"))
    with pytest.raises(NoBlocks) as refused:
        cache.reserve(5, chain("abcd"), STATE, "r")
    assert (refused.value.free, refused.value.needed) == (0, 1)
    assert pool.counts()[BlockState.CACHED] == 4, "nothing was taken"
    assert cache.has_room(4, chain("abcd"))
    held.release()
    assert cache.has_room(5, chain("abcd"))


def test_there_is_room_for_more_than_is_free_where_much_is_held_by_others(
    cache: PrefixCache, pool: BlockPool
) -> None:
    holding, _ = cache.reserve(6, chain("abcdef"), STATE, "r1")
    cache.add(chain("abcdef"), holding.blocks)
    assert pool.free == 2
    assert cache.has_room(8, chain("abcdef")) and not cache.has_room(9, chain("abcdef"))
    second, cached = cache.reserve(8, chain("abcdef"), STATE, "r2")
    assert (cached, len(second.blocks)) == (6, 8)


def test_of_two_that_computed_the_same_one_is_kept(cache: PrefixCache, pool: BlockPool) -> None:
    first, _ = cache.reserve(2, chain("ab"), STATE, "r1")
    second, _ = cache.reserve(2, chain("ab"), STATE, "r2")
    cache.add(chain("ab"), first.blocks)
    cache.add(chain("ab"), second.blocks)
    second.release()
    first.release()
    assert pool.counts()[BlockState.CACHED] == 2
    assert pool.counts()[BlockState.FREE] == 6


def test_a_beginning_that_was_evicted_hides_what_follows(
    cache: PrefixCache, pool: BlockPool
) -> None:
    blocks = put(cache, "ab")
    first = pool.share(blocks[:1])
    later, _ = cache.reserve(3, chain("xyz"), STATE, "r")
    first.release()
    later.release()
    # Last released, so that of the two `b` goes first.
    taken = pool.reserve(7)
    assert cache.find(chain("ab")) == blocks[:1]
    taken.release()


def test_what_is_distrusted_is_found_no_more_by_anybody(
    cache: PrefixCache, pool: BlockPool
) -> None:
    put(cache, "abcd")
    one, _ = cache.reserve(3, chain("abx"), STATE, "r1")
    other, _ = cache.reserve(4, chain("abyz"), STATE, "r2")
    cache.distrust(one.blocks)
    assert cache.find(chain("abcd")) == []
    one.release()
    assert pool.counts()[BlockState.FREE] == 2, "a and b have a holder, c and d are cached"
    other.release()
    assert pool.counts() == {**pool.counts(), BlockState.FREE: 6, BlockState.CACHED: 2}


def test_what_has_come_anew_is_trusted_though_older_holders_are_not(cache: PrefixCache) -> None:
    put(cache, "ab")
    older = [cache.reserve(2, chain("ab"), STATE, f"r{i}")[0] for i in range(2)]
    cache.distrust(older[0].blocks)
    anew = put(cache, "ab")
    assert set(anew).isdisjoint(older[1].blocks)
    cache.distrust(older[1].blocks)
    assert cache.find(chain("ab")) == anew


def test_of_two_that_hold_the_same_only_the_distrusted_is_found_no_more(
    cache: PrefixCache,
) -> None:
    first, _ = cache.reserve(2, chain("ab"), STATE, "r1")
    second, _ = cache.reserve(2, chain("ab"), STATE, "r2")
    cache.add(chain("ab"), first.blocks)
    cache.add(chain("ab"), second.blocks)
    cache.distrust(second.blocks)
    assert cache.find(chain("ab")) == first.blocks


def test_no_share_of_the_pool_keeps_and_finds_nothing(pool: BlockPool) -> None:
    cache = PrefixCache(pool, 0.0)
    assert not cache.enabled
    put(cache, "abc")
    assert len(cache) == 0
    assert pool.counts()[BlockState.FREE] == 8


def test_the_share_bounds_what_nobody_holds(pool: BlockPool) -> None:
    cache = PrefixCache(pool, 0.25)
    blocks = put(cache, "abcd")
    assert pool.counts()[BlockState.CACHED] == 2
    assert cache.find(chain("abcd")) == blocks[:2], "the beginning is worth more than the end"
    cache.check()


TEXTS = st.text("ab", max_size=6)


class CacheMachine(RuleBasedStateMachine):
    """Requests for short texts of two letters over a small pool. Each block has the text up to its
    end written into it by whoever took it new; whoever shares it must read that."""

    TOTAL = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.TOTAL)
        self.cache = PrefixCache(self.pool, 1.0)
        self.written: dict[int, str] = {}
        self.requests: dict[Holding, tuple[str, int]] = {}

    requests_made = Bundle("requests_made")

    @rule(target=requests_made, text=TEXTS, more=st.integers(0, 2))
    def ask(self, text: str, more: int) -> Holding | MultipleResults[Holding]:
        pinned = {b: self.written[b] for h in self.requests for b in h.blocks if b in self.written}
        room = self.cache.has_room(len(text) + more, chain(text))
        try:
            holding, cached = self.cache.reserve(len(text) + more, chain(text), STATE, text)
        except NoBlocks:
            assert not room
            return multiple()
        assert room
        assert set(holding.blocks[cached:]).isdisjoint(pinned), "pinned blocks are never evicted"
        for i, block in enumerate(holding.blocks):
            if i < cached:
                assert self.written[block] == text[: i + 1]
            else:
                self.written[block] = "half of it"
        self.requests[holding] = (text, cached)
        return holding

    @rule(holding=requests_made, part=st.integers(0, 6))
    def write(self, holding: Holding, part: int) -> None:
        """More of its blocks are complete, and known to others."""
        text, done = self.requests[holding]
        upto = max(done, min(part, len(text)))
        for i in range(done, upto):
            self.written[holding.blocks[i]] = text[: i + 1]
        self.cache.add(chain(text)[:upto], holding.blocks, done)
        self.requests[holding] = (text, upto)

    @rule(holding=requests_made)
    def distrust(self, holding: Holding) -> None:
        text, _ = self.requests[holding]
        self.cache.distrust(holding.blocks)
        assert set(self.cache.find(chain(text))).isdisjoint(holding.blocks)

    @rule(holding=requests_made, n=st.integers(1, 2))
    def grow(self, holding: Holding, n: int) -> None:
        before = {b for h in self.requests for b in h.blocks}
        try:
            holding.grow(n)
        except NoBlocks:
            return
        assert before.isdisjoint(holding.blocks[-n:])
        for block in holding.blocks[-n:]:
            self.written[block] = "half of it"

    @rule(holding=consumes(requests_made))
    def leave(self, holding: Holding) -> None:
        del self.requests[holding]
        holding.release()

    @rule()
    def crowd_out(self) -> None:
        """A request takes all that nobody holds, and is gone."""
        self.pool.reserve(self.pool.free).release()
        held = {block for holding in self.requests for block in holding.blocks}
        assert self.pool.kept() <= held

    @rule(text=TEXTS)
    def find(self, text: str) -> None:
        for i, block in enumerate(self.cache.find(chain(text))):
            assert self.written[block] == text[: i + 1]

    @invariant()
    def is_whole(self) -> None:
        self.pool.check()
        self.cache.check()
        for holding, (text, done) in self.requests.items():
            for i in range(done):
                assert self.written[holding.blocks[i]] == text[: i + 1]

    def teardown(self) -> None:
        for holding in self.requests:
            holding.release()
        assert self.pool.free == self.TOTAL
        assert_whole(self.pool)
        assert len(self.cache) == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
