"""The block pool: which physical blocks are free, and who holds the others in what state.

The pool knows numbers of blocks only; their bytes are the engine's. It is not thread-safe: the
machine that owns it is fed from one thread.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence


class BlockState(enum.IntEnum):
    """The class a block counts in. The value is the order: of the states of a shared block's
    holders, the greatest one counts."""

    FREE = 0
    """Nobody holds it and its contents mean nothing."""
    CACHED = 1
    """Nobody holds it, but its contents are worth keeping until the room is needed."""
    RESERVED = 2
    """Granted; no byte of it has come yet."""
    COMPUTING = 3
    """P computes KV into it."""
    SENDING = 4
    """P has computed it and D has not acknowledged all of it."""
    RECEIVING = 5
    """D takes KV into it."""
    DECODING = 6
    """D decodes from it."""
    QUARANTINED = 7
    """Its transfer has ended, but a one-sided writer may still touch it."""


_UNHELD = (BlockState.FREE, BlockState.CACHED)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)


class NoBlocks(Exception):
    """`needed` blocks were asked for and only `free` could be had; nothing was taken."""

    def __init__(self, free: int, needed: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free")
        self.free = free
        self.needed = needed


class HoldingReleased(RuntimeError):
    """A holding was used after its release: a bug of the caller, and nothing was changed."""


class PoolCorrupt(AssertionError):
    """The pool's accounts contradict each other; the message names what differs."""


class Holding:
    """Some blocks that one owner has in one state. Made by `BlockPool.reserve` and `share`."""

    __slots__ = ("_blocks", "_owner", "_pool", "_released", "_state")

    def __init__(self, pool: BlockPool, blocks: list[int], state: BlockState, owner: str) -> None:
        self._pool = pool
        self._blocks = blocks
        self._state = state
        self._owner = owner
        self._released = False

    @property
    def blocks(self) -> list[int]:
        """Physical blocks in logical order, empty once released. The pool's own list, which grows
        in place: read it, copy it to keep it, never change it."""
        return self._blocks

    @property
    def state(self) -> BlockState:
        """The state it was last moved to, also after its release."""
        return self._state

    @property
    def owner(self) -> str:
        """For people: whose blocks these are."""
        return self._owner

    @property
    def released(self) -> bool:
        """Whether the blocks were given back."""
        return self._released

    def move(self, state: BlockState) -> None:
        """Change the state of all its blocks. ValueError for FREE and CACHED, which have no holder,
        and for leaving QUARANTINED, whose only way out is `release`."""
        self._check_live()
        _check_held_state(state)
        if self._state is BlockState.QUARANTINED and state is not self._state:
            raise ValueError(f"quarantined blocks of {self._owner!r} cannot become {state.name}")
        self._pool._move(self, state)

    def grow(self, n: int = 1) -> None:
        """Take `n` more blocks and append them. NoBlocks, taking nothing, if there are too few;
        ValueError in QUARANTINED, for what has ended needs no more."""
        self._check_live()
        if self._state is BlockState.QUARANTINED:
            raise ValueError(f"quarantined blocks of {self._owner!r} cannot grow")
        self._pool._grow(self, n)

    def split(self, n: int) -> Holding:
        """Hand the first `n` blocks over to a new holding of the same owner and state, and keep the
        others. ValueError, changing nothing, when it has fewer."""
        self._check_live()
        if not 0 <= n <= len(self._blocks):
            raise ValueError(f"n: {self._owner!r} has {len(self._blocks)} blocks, not {n}")
        return self._pool._split(self, n)

    def quarantine(self) -> None:
        """Keep the blocks from being reused until a writer is known to have stopped."""
        self.move(BlockState.QUARANTINED)

    def release(self) -> None:
        """Give all blocks back. HoldingReleased the second time."""
        self._check_live()
        self._pool._release(self)

    def _check_live(self) -> None:
        if self._released:
            raise HoldingReleased(f"the blocks of {self._owner!r} were released before")

    def __repr__(self) -> str:
        what = "released" if self._released else self._state.name
        return f"Holding({self._owner!r}, {what}, {len(self._blocks)} blocks)"


class BlockPool:
    """`total` blocks, numbered from 0, and their holders.

    Every call costs time in the blocks it touches, not in the size of the pool. The block that was
    freed first is used first, so that a late reader or writer of a freed block meets the same
    contents in every run, and the longest time passes before it does harm.
    """

    def __init__(self, total: int, on_evict: Callable[[int], None] | None = None) -> None:
        """`on_evict` is told of each cached block whose contents are about to be lost."""
        if total < 1:
            raise ValueError(f"total: a pool has at least 1 block, not {total}")
        self._total = total
        self._on_evict = on_evict
        self._keep_most = total
        self._free: deque[int] = deque(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self._class = [BlockState.FREE] * total
        self._holders: list[list[Holding]] = [[] for _ in range(total)]
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = total
        self._live: set[Holding] = set()

    @property
    def total(self) -> int:
        """Blocks in the pool."""
        return self._total

    @property
    def free(self) -> int:
        """Blocks that `reserve` could have now: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    def state_of(self, block: int) -> BlockState:
        """The class that a block counts in."""
        return self._class[block]

    def counts(self) -> dict[BlockState, int]:
        """Blocks of each state; all states are there and the sum is `total`."""
        return dict(self._counts)

    def holdings(self) -> list[Holding]:
        """All holdings that are not released, in no order."""
        return list(self._live)

    def reserve(self, n: int, state: BlockState = BlockState.RESERVED, owner: str = "") -> Holding:
        """Take `n` blocks (0 is allowed). NoBlocks, taking nothing, if there are too few."""
        _check_held_state(state)
        holding = Holding(self, [], state, owner)
        self._grow(holding, n)
        self._live.add(holding)
        return holding

    def share(
        self,
        blocks: Sequence[int],
        state: BlockState = BlockState.RESERVED,
        owner: str = "",
    ) -> Holding:
        """One more holder of blocks that are held or cached, in the order given. They stay until
        their last holder releases them. ValueError, changing nothing, when one is free (its
        contents are nobody's), unknown or named twice."""
        _check_held_state(state)
        self._check_known(blocks)
        holding = Holding(self, list(blocks), state, owner)
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block].append(holding)
            self._reclassify(block)
        self._live.add(holding)
        return holding

    def keep(self, blocks: Sequence[int]) -> None:
        """Mark held blocks: once their last holder is gone they are cached instead of free, until
        `reserve` evicts the one that has been cached longest. ValueError as for `share`."""
        self._check_known(blocks)
        self._kept.update(blocks)

    def keep_no_more(self, blocks: Sequence[int]) -> None:
        """Take the mark from kept blocks: they are free once nobody holds them, which of cached
        ones is now. ValueError, changing nothing, when one is not kept or named twice."""
        self._check_known(blocks)
        for block in blocks:
            if block not in self._kept:
                raise ValueError(f"block {block} is not kept")
        for block in blocks:
            self._kept.remove(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)
            self._reclassify(block)

    def kept(self) -> set[int]:
        """The blocks that are cached, or will be once their last holder is gone."""
        return set(self._kept)

    def keep_at_most(self, blocks: int, on_evict: Callable[[int], None]) -> None:
        """Bound how many blocks are cached, and say who is told of each that is evicted. Beyond the
        bound the one that has been cached longest is."""
        self._keep_most = blocks
        self._on_evict = on_evict
        self._evict_surplus()

    def check(self) -> None:
        """PoolCorrupt unless every block is in exactly one class, the one its holders say, and the
        counts agree. Costs time in the size of the pool."""
        held: dict[int, BlockState] = {}
        for holding in self._live:
            for block in holding.blocks:
                held[block] = max(held.get(block, holding.state), holding.state)
        expected = dict.fromkeys(BlockState, 0)
        free = self._free_set()
        for block in range(self._total):
            where = [
                state
                for state, inside in (
                    (held.get(block, BlockState.FREE), block in held),
                    (BlockState.FREE, block in free),
                    (BlockState.CACHED, block in self._cached),
                )
                if inside
            ]
            if len(where) != 1 or where[0] is not self._class[block]:
                raise PoolCorrupt(
                    f"block {block} counts as {self._class[block].name} and is "
                    f"{' and '.join(s.name for s in where) or 'nowhere'}"
                )
            expected[where[0]] += 1
        for state, count in expected.items():
            if self._counts[state] != count:
                raise PoolCorrupt(
                    f"{self._counts[state]} blocks counted {state.name}, {count} are; "
                    f"total {self._total}"
                )

    def _free_set(self) -> set[int]:
        free = set(self._free)
        if len(free) != len(self._free):
            raise PoolCorrupt(f"{len(self._free) - len(free)} blocks are free twice")
        if not free.isdisjoint(self._kept):
            raise PoolCorrupt(f"blocks {sorted(free & self._kept)} are free and kept")
        return free

    def _check_known(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {list(blocks)} name one twice")
        for block in blocks:
            if not 0 <= block < self._total:
                raise ValueError(f"block {block} is outside the pool of {self._total}")
            if self._class[block] is BlockState.FREE:
                raise ValueError(f"block {block} is free")

    def _grow(self, holding: Holding, n: int) -> None:
        if n < 0:
            raise ValueError(f"n: cannot take {n} blocks")
        if n > self.free:
            raise NoBlocks(self.free, n)
        for _ in range(n):
            block = self._free.popleft() if self._free else self._evict()
            self._holders[block].append(holding)
            self._reclassify(block)
            holding._blocks.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._kept.remove(block)
        if self._on_evict is not None:
            self._on_evict(block)
        return block

    def _split(self, holding: Holding, n: int) -> Holding:
        first = Holding(self, holding.blocks[:n], holding.state, holding.owner)
        for block in first.blocks:
            self._holders[block].remove(holding)
            self._holders[block].append(first)
        # A new list, as in `_release`.
        holding._blocks = holding.blocks[n:]
        self._live.add(first)
        return first

    def _move(self, holding: Holding, state: BlockState) -> None:
        holding._state = state
        for block in holding.blocks:
            self._reclassify(block)

    def _release(self, holding: Holding) -> None:
        holding._released = True
        self._live.remove(holding)
        for block in holding.blocks:
            self._holders[block].remove(holding)
            if not self._holders[block] and block not in self._kept:
                self._free.append(block)
            self._reclassify(block)
        # Backwards: a block is of no use without those before it, so the last one is evicted first.
        for block in reversed(holding.blocks):
            if self._class[block] is BlockState.CACHED:
                self._cached[block] = None
        self._evict_surplus()
        # A new list: one that a caller still holds goes on saying what was held.
        holding._blocks = []

    def _evict_surplus(self) -> None:
        while len(self._cached) > self._keep_most:
            block = self._evict()
            self._free.append(block)
            self._reclassify(block)

    def _reclassify(self, block: int) -> None:
        holders = self._holders[block]
        if holders:
            state = max(holder.state for holder in holders)
        else:
            state = BlockState.CACHED if block in self._kept else BlockState.FREE
        self._counts[self._class[block]] -= 1
        self._counts[state] += 1
        self._class[block] = state


def _check_held_state(state: BlockState) -> None:
    if state in _UNHELD:
        raise ValueError(f"state: a held block cannot be {state.name}")
