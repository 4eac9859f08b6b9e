"""Timers as data: what fires when, without a thread or a sleep."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """A table of named moments. Setting a key again moves it; times are seconds of one clock."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at: float) -> None:
        """Fire `key` at time `at`, instead of whenever it was to fire before."""
        if self._at.get(key) == at:
            return
        self._at[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._compact()

    def cancel(self, key: K) -> None:
        """Forget `key`; nothing happens when it is not set."""
        self._at.pop(key, None)

    def at(self, key: K) -> float | None:
        """When `key` fires, if it is set."""
        return self._at.get(key)

    def next(self) -> float | None:
        """When the first timer fires; None when none is set."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[K]:
        """Remove and return every key whose time has come, earliest first."""
        due = []
        while (at := self.next()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            due.append(key)
        return due

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
