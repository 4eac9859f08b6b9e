"""The memory of what has ended: for a time, and of a number, whichever is less."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from pd_grpc.protocol.refs import TransferKey

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


class Remembered(Generic[K, R]):
    """Remembers a record of each key for `life_s`, at most `limit` of them, oldest out first."""

    def __init__(self, life_s: float, limit: int) -> None:
        self._life_s = life_s
        self._limit = limit
        self._records: OrderedDict[K, tuple[float, R]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, key: K, record: R, now: float) -> None:
        """Remember it. A second record of a key that is remembered is ignored."""
        self._forget_old(now)
        if key in self._records:
            return
        self._records[key] = (now, record)
        while len(self._records) > self._limit:
            self._pop_oldest()

    def get(self, key: K, now: float) -> R | None:
        """What is remembered of `key`."""
        self._forget_old(now)
        entry = self._records.get(key)
        return None if entry is None else entry[1]

    def _forget_old(self, now: float) -> None:
        while self._records and next(iter(self._records.values()))[0] + self._life_s <= now:
            self._pop_oldest()

    def _pop_oldest(self) -> K:
        return self._records.popitem(last=False)[0]


class Tombstones(Remembered[TransferKey, R]):
    """How each transfer ended, which it does once; and the newest attempt of each that did."""

    def __init__(self, life_s: float, limit: int) -> None:
        super().__init__(life_s, limit)
        self._newest: dict[str, int] = {}

    def add(self, key: TransferKey, record: R, now: float) -> None:
        """Remember that `key` ended. A second end is ignored."""
        self._forget_old(now)
        if key not in self._records:
            self._newest[key.transfer_id] = max(key.attempt, self._newest.get(key.transfer_id, 0))
            super().add(key, record, now)

    def newest(self, transfer_id: str, now: float) -> int:
        """The greatest attempt remembered of a transfer; 0 for none."""
        self._forget_old(now)
        return self._newest.get(transfer_id, 0)

    def _pop_oldest(self) -> TransferKey:
        key = super()._pop_oldest()
        if self._newest.get(key.transfer_id) == key.attempt:
            del self._newest[key.transfer_id]
        return key
