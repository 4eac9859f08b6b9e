"""Blocks whose transfer has ended, but which somebody may still touch.

Time frees none of them: each writer must have said that it has stopped, or be known to be gone.
Blocks that the prefix cache knows have no writer and are never quarantined, for others may be given
them; only an engine that reads them has them kept from being evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pd_grpc.blocks.pool import Holding
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.refs import TransferKey

ENGINE = "engine"
"""D's own engine, whose step runs."""
PREFILL = "prefill"
"""The P process that the transfer was granted to, by a transport by which it writes itself."""


def receiver(shard: int) -> str:
    """One of D's own shards."""
    return f"shard {shard}"


@dataclass
class _Entry:
    holding: Holding
    read: Holding
    key: TransferKey
    owner: Owner | None
    writers: set[str]
    incomplete: set[int]


class Quarantine:
    """Who may still touch what, and which P processes can write to the pool at all."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[TransferKey, set[str]] = {}
        """The grants of each key: a key may be used again once D has forgotten its transfer."""
        self._attached: set[Owner] = set()

    def __len__(self) -> int:
        """Transfers whose blocks it has."""
        return len(self._entries)

    def holding(self, grant_id: str) -> Holding | None:
        """The blocks of a transfer that may be written to, if it has them."""
        entry = self._entries.get(grant_id)
        return None if entry is None else entry.holding

    def holdings(self) -> list[Holding]:
        """All that it has."""
        both = [h for entry in self._entries.values() for h in (entry.read, entry.holding)]
        return [holding for holding in both if not holding.released]

    def is_attached(self, owner: Owner) -> bool:
        """Whether a P process can write to the pool."""
        return owner in self._attached

    def attached(self, owner: Owner) -> None:
        """It can from now on."""
        self._attached.add(owner)

    def gone(self, owner: Owner) -> None:
        """It cannot any more: it no longer counts as a writer of anything."""
        self._attached.discard(owner)
        for grant_id, entry in list(self._entries.items()):
            if entry.owner == owner:
                self.stopped(grant_id, PREFILL)

    def all_gone(self) -> None:
        """No P can."""
        for owner in list(self._attached):
            self.gone(owner)

    def take(
        self,
        grant_id: str,
        key: TransferKey,
        holding: Holding,
        owner: Owner | None,
        writers: set[str],
        kept: int = 0,
        incomplete: Iterable[int] = (),
    ) -> None:
        """Keep blocks until the last of `writers` has stopped; release them if there are none. The
        first `kept` are the prefix cache's and are written to by none of them; `incomplete` are the
        shards that have not heard that P writes no more."""
        if not writers:
            holding.release()
            return
        read = holding.split(kept)
        holding.quarantine()
        self._entries[grant_id] = _Entry(holding, read, key, owner, writers, set(incomplete))
        if ENGINE not in writers:
            read.release()
        self._by_key.setdefault(key, set()).add(grant_id)

    def stopped(self, grant_id: str, writer: str) -> None:
        """`writer` will not touch the blocks of a grant any more: release them after the last."""
        entry = self._entries.get(grant_id)
        if entry is None:
            return
        entry.writers.discard(writer)
        if writer == ENGINE and not entry.read.released:
            entry.read.release()
        if not entry.writers:
            entry.holding.release()
            del self._entries[grant_id]
            grants = self._by_key[entry.key]
            grants.discard(grant_id)
            if not grants:
                del self._by_key[entry.key]

    def completed(self, grant_id: str, shard: int) -> None:
        """P has said to a shard that it writes no more there: it has stopped with the last one."""
        entry = self._entries.get(grant_id)
        if entry is not None:
            entry.incomplete.discard(shard)
            if not entry.incomplete:
                self.stopped(grant_id, PREFILL)

    def prefill_stopped(self, key: TransferKey, owner: Owner) -> bool:
        """The P process `owner` says that it writes no more for a transfer; of another's it may say
        what it will. Whether that was waited for."""
        waited_for = False
        for grant_id in tuple(self._by_key.get(key, ())):
            entry = self._entries[grant_id]
            if entry.owner == owner:
                waited_for = waited_for or PREFILL in entry.writers
                self.stopped(grant_id, PREFILL)
        return waited_for
