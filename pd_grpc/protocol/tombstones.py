"""The memory of transfers that have ended."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from pd_grpc.protocol.refs import TransferKey

R = TypeVar("R")


class Tombstones(Generic[R]):
    """Remembers how each transfer ended for `life_s`, at most `limit` of them, oldest out first."""

    def __init__(self, life_s: float, limit: int) -> None:
        self._life_s = life_s
        self._limit = limit
        self._records: OrderedDict[TransferKey, tuple[float, R]] = OrderedDict()
        self._newest: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, key: TransferKey, record: R, now: float) -> None:
        """Remember that `key` ended. A transfer ends once: a second record is ignored."""
        self._forget_old(now)
        if key in self._records:
            return
        self._records[key] = (now, record)
        self._newest[key.transfer_id] = max(key.attempt, self._newest.get(key.transfer_id, 0))
        while len(self._records) > self._limit:
            self._pop_oldest()

    def get(self, key: TransferKey, now: float) -> R | None:
        """How `key` ended, while it is remembered."""
        self._forget_old(now)
        entry = self._records.get(key)
        return None if entry is None else entry[1]

    def newest(self, transfer_id: str, now: float) -> int:
        """The greatest attempt remembered of a transfer; 0 for none."""
        self._forget_old(now)
        return self._newest.get(transfer_id, 0)

    def _forget_old(self, now: float) -> None:
        while self._records and next(iter(self._records.values()))[0] + self._life_s <= now:
            self._pop_oldest()

    def _pop_oldest(self) -> None:
        key, _ = self._records.popitem(last=False)
        if self._newest.get(key.transfer_id) == key.attempt:
            del self._newest[key.transfer_id]
