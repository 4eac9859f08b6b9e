"""Who waits for blocks: a bounded queue, first in and first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from pd_grpc.blocks.pool import BlockState, Holding, NoBlocks
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.protocol.faults import RETRY_AFTER_S, Fault, Quota, Reason


class Reserved(NamedTuple):
    """Blocks for one request, the first `cached` of which hold its KV already and are shared."""

    holding: Holding
    cached: int


class _Ask(NamedTuple):
    blocks: int
    names: Sequence[bytes]


class Reservations:
    """Grants blocks of a pool in the order they were asked for.

    Nobody overtakes: while the one at the head does not fit, all behind it wait, so that a large
    request is not starved by small ones. `held_back` keeps everyone waiting, for those that go
    ahead of the queue.
    """

    def __init__(self, cache: PrefixCache, limit: int) -> None:
        self._cache = cache
        self._limit = limit
        self._waiting: OrderedDict[str, _Ask] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def request(
        self, grant_id: str, blocks: int, names: Sequence[bytes], held_back: bool
    ) -> Reserved | None:
        """Take `blocks` now, those of the chain `names` that are cached among them, or join the
        queue and return None. Fault QUEUE_FULL when as many wait already as may."""
        ask = _Ask(blocks, names)
        if not self._waiting and not held_back:
            reserved = self._try(grant_id, ask)
            if reserved is not None:
                return reserved
        if len(self._waiting) >= self._limit:
            raise queue_full(
                f"{self._limit} requests wait for blocks", blocks, self._cache.pool.free
            )
        self._waiting[grant_id] = ask
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
        grant_id, ask = next(iter(self._waiting.items()))
        return grant_id if self._cache.has_room(ask.blocks, ask.names) else None

    def take(self, grant_id: str) -> Reserved:
        """Grant to one whose turn has come."""
        return self._reserve(grant_id, self._waiting.pop(grant_id))

    def _try(self, grant_id: str, ask: _Ask) -> Reserved | None:
        try:
            return self._reserve(grant_id, ask)
        except NoBlocks:
            return None

    def _reserve(self, grant_id: str, ask: _Ask) -> Reserved:
        return Reserved(*self._cache.reserve(ask.blocks, ask.names, BlockState.RESERVED, grant_id))


def queue_full(who: str, needed: int, free: int) -> Fault:
    """As many wait already as may."""
    quota = Quota(needed, free)
    return Fault(Reason.QUEUE_FULL, f"{who} already", retry_after_s=RETRY_AFTER_S, quota=quota)


def no_blocks(needed: int, free: int) -> Fault:
    """No blocks within max_wait."""
    text = f"{needed} blocks needed, {free} free, and others wait or max_wait is over"
    return Fault(Reason.NO_BLOCKS, text, retry_after_s=RETRY_AFTER_S, quota=Quota(needed, free))
