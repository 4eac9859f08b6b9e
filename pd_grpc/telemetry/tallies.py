"""Counters and histograms that are cheap where they are told: the SDK hears of many at once.

One record of the SDK's takes 6 us of a request that makes some thirty. A tally adds up by itself
and is looked at when it is exported; a spread hands its values on in batches, the last of them when
it is exported, so that an export lacks nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from opentelemetry.metrics import Histogram
from opentelemetry.util.types import AttributeValue

BATCH = 64
"""Values of one set of labels that wait at most."""

Labels = Mapping[str, AttributeValue]
_NONE: Labels = {}
_Key = tuple[tuple[str, AttributeValue], ...]


class Counting(Protocol):
    """What only grows."""

    def add(self, amount: float, attributes: Labels) -> None:
        """So much more."""
        ...


class Measuring(Protocol):
    """What is spread."""

    def record(self, amount: float, attributes: Labels = ...) -> None:
        """One value."""
        ...


class Tally:
    """Adds up what it is told, by labels. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[_Key, float] = {}

    def add(self, amount: float, attributes: Labels) -> None:
        """So much more. 0 makes the labels known."""
        key = tuple(attributes.items())
        with self._lock:
            self._sums[key] = self._sums.get(key, 0) + amount

    def sums(self) -> list[tuple[float, Labels]]:
        """All so far."""
        with self._lock:
            return [(amount, dict(key)) for key, amount in self._sums.items()]


class Spread:
    """Keeps values back for `histogram`. Safe from any thread."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._lock = threading.Lock()
        self._waiting: dict[_Key, list[float]] = {}

    def record(self, amount: float, attributes: Labels = _NONE) -> None:
        """One value."""
        key = tuple(attributes.items())
        with self._lock:
            values = self._waiting.get(key)
            if values is None:
                values = self._waiting[key] = []
            values.append(amount)
            if len(values) < BATCH:
                return
            del self._waiting[key]
        self._hand_on(key, values)

    def flush(self) -> None:
        """Hand on what waits."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for key, values in waiting.items():
            self._hand_on(key, values)

    def _hand_on(self, key: _Key, values: list[float]) -> None:
        labels = dict(key)
        for value in values:
            self._histogram.record(value, labels)
