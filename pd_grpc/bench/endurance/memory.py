"""Whether memory grows with the requests that are served."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

SETTLES_AFTER = 2000
"""Requests after which a process has the memory that it needs: its tables are full, and what is
freed is used again."""
_LEAST_REQUESTS = 500
"""What a slope is told from must span so many at least."""


class MemorySeries:
    """Resident memory of processes, against the number of requests sent by then."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._samples: dict[int, list[tuple[int, float]]] = defaultdict(list)

    def add(self, requests: int, memory_kib: Mapping[int, tuple[str, float]]) -> None:
        """Note the memory and name of each process, by its id."""
        for pid, (name, kib) in memory_kib.items():
            self._names[pid] = name
            self._samples[pid].append((requests, kib))

    def growth_kib_per_1000(self) -> dict[str, float]:
        """KiB per 1,000 requests, by name, of each process that has lived on long enough after its
        first 2,000."""
        found: dict[str, float] = {}
        for pid, samples in self._samples.items():
            begin = samples[0][0] + SETTLES_AFTER
            settled = [sample for sample in samples if sample[0] >= begin]
            if settled and settled[-1][0] - settled[0][0] >= _LEAST_REQUESTS:
                name = self._names[pid]
                found[name] = max(found.get(name, float("-inf")), 1000 * slope(settled))
        return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line through the points that has the least squares; of two points or more
    that do not lie above each other."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
