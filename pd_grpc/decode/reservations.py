"""Who waits for blocks: a bounded queue, first in and first out."""

from __future__ import annotations

from collections import OrderedDict

from pd_grpc.blocks.pool import BlockPool, BlockState, Holding, NoBlocks
from pd_grpc.protocol.faults import RETRY_AFTER_S, Fault, Quota, Reason


class Reservations:
    """Grants blocks of a pool in the order they were asked for.

    Nobody overtakes: while the one at the head does not fit, all behind it wait, so that a large
    request is not starved by small ones. `held_back` keeps everyone waiting, for those that go
    ahead of the queue.
    """

    def __init__(self, pool: BlockPool, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._waiting: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def request(self, grant_id: str, blocks: int, held_back: bool) -> Holding | None:
        """Take `blocks` now, or join the queue and return None. Fault QUEUE_FULL when as many wait
        already as may."""
        if not self._waiting and not held_back:
            holding = self._try(grant_id, blocks)
            if holding is not None:
                return holding
        if len(self._waiting) >= self._limit:
            raise queue_full(f"{self._limit} requests wait for blocks", blocks, self._pool.free)
        self._waiting[grant_id] = blocks
        return None

    def leave(self, grant_id: str) -> None:
        """Stop waiting; nothing happens to one that does not wait."""
        self._waiting.pop(grant_id, None)

    @property
    def head(self) -> str | None:
        """The one that has waited longest."""
        return next(iter(self._waiting), None)

    def next_fitting(self, held_back: bool) -> str | None:
        """The one at the head, if its turn has come: it fits now."""
        if not self._waiting or held_back:
            return None
        grant_id, blocks = next(iter(self._waiting.items()))
        return grant_id if blocks <= self._pool.free else None

    def take(self, grant_id: str) -> Holding:
        """Grant to one whose turn has come."""
        return self._pool.reserve(self._waiting.pop(grant_id), BlockState.RESERVED, grant_id)

    def _try(self, grant_id: str, blocks: int) -> Holding | None:
        try:
            return self._pool.reserve(blocks, BlockState.RESERVED, grant_id)
        except NoBlocks:
            return None


def queue_full(who: str, needed: int, free: int) -> Fault:
    """As many wait already as may."""
    quota = Quota(needed, free)
    return Fault(Reason.QUEUE_FULL, f"{who} already", retry_after_s=RETRY_AFTER_S, quota=quota)


def no_blocks(needed: int, free: int) -> Fault:
    """No blocks within max_wait."""
    text = f"{needed} blocks needed, {free} free, and others wait or max_wait is over"
    return Fault(Reason.NO_BLOCKS, text, retry_after_s=RETRY_AFTER_S, quota=Quota(needed, free))
