"""The prefix cache: blocks found again by the name of what they hold.

A name is given by `pd_grpc.protocol.block_hashes` and stands for everything up to its block's end,
so that a block may be used by whoever asks for that name, after the blocks of the names before it.
The cache holds no block itself. A block that it knows is held by requests, or nobody holds it and
the pool keeps it as long as there is room; a block that is taken for something else is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.blocks.pool import BlockPool, BlockState, Holding, NoBlocks


class PrefixCache:
    """Which block of a pool holds what. `share` of the pool, 0 to 1, is the most that is kept while
    nobody holds it; 0 keeps and finds nothing."""

    def __init__(self, pool: BlockPool, share: float) -> None:
        self._pool = pool
        self._most = int(share * pool.total)
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self.asked_blocks = 0
        """Whole blocks that requests which got their blocks had named."""
        self.found_blocks = 0
        """Of those, the ones that were known."""
        pool.keep_at_most(self._most, self._forget)

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        return self._most > 0

    @property
    def pool(self) -> BlockPool:
        """Whose blocks it knows."""
        return self._pool

    def __len__(self) -> int:
        """Blocks that can be found, held ones included."""
        return len(self._block_of)

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain."""
        found: list[int] = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def has_room(self, blocks: int, names: Sequence[bytes]) -> bool:
        """Whether `reserve` would not raise."""
        if not names or blocks <= self._pool.free:
            return blocks <= self._pool.free
        found = self.find(names[:blocks])
        return blocks - len(found) <= self._pool.free - self._unheld(found)

    def reserve(
        self, blocks: int, names: Sequence[bytes], state: BlockState, owner: str
    ) -> tuple[Holding, int]:
        """`blocks` blocks, of which as many as are known of the chain `names` come first and are
        shared; and how many those are. NoBlocks, taking nothing, if there are too few. The shared
        ones must never be written to."""
        found = self.find(names[:blocks])
        room = self._pool.free - self._unheld(found)
        if blocks - len(found) > room:
            raise NoBlocks(room, blocks - len(found))
        holding = self._pool.share(found, state, owner)
        holding.grow(blocks - len(found))
        self.asked_blocks += len(names)
        self.found_blocks += len(found)
        return holding, len(found)

    def add(self, names: Sequence[bytes], blocks: Sequence[int], first: int = 0) -> None:
        """The held `blocks[i]` has for good what `names[i]` says, from `first` on. Of two blocks of
        one name the one that was known before stays."""
        if not self.enabled:
            return
        added = []
        for name, block in zip(names[first:], blocks[first:], strict=False):
            if name in self._block_of or block in self._name_of:
                continue
            self._block_of[name] = block
            self._name_of[block] = name
            added.append(block)
        self._pool.keep(added)

    def distrust(self, blocks: Sequence[int]) -> None:
        """What `blocks` hold may be wrong: those that it knows are found no more, and are free once
        nobody holds them. Another block that has come to one of their names since is still found,
        and so is what lies behind them, by whoever brings that beginning anew."""
        known = [block for block in blocks if block in self._name_of]
        for block in known:
            self._forget(block)
        self._pool.keep_no_more(known)

    def check(self) -> None:
        """AssertionError unless exactly the blocks that it knows are kept by the pool."""
        assert {block: name for name, block in self._block_of.items()} == self._name_of
        assert self._pool.kept() == set(self._name_of)
        assert self._pool.counts()[BlockState.CACHED] <= self._most

    def _unheld(self, blocks: Sequence[int]) -> int:
        return sum(self._pool.state_of(block) is BlockState.CACHED for block in blocks)

    def _forget(self, block: int) -> None:
        del self._block_of[self._name_of.pop(block)]
