"""Medians, and how sure they are."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

RESAMPLES = 10_000
METHOD = f"percentile bootstrap of the median, {RESAMPLES} resamples, 95%"


class Estimate(NamedTuple):
    """A median with the bounds of its 95% interval."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value or more; ValueError for none. With five values the interval is nearly their
    whole range, for five tell no more."""
    if not values:
        raise ValueError("values: there is none to take the median of")
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return Estimate(statistics.median(values), low, high)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of them do not exceed; ValueError for
    none."""
    if not values:
        raise ValueError("values: there is none to take a percentile of")
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def steady_rate(times_s: Sequence[float], window_s: float) -> float:
    """How many a second lie within the window, but for its first quarter, in which what is measured
    gets going."""
    begin_s = window_s / 4
    return sum(begin_s < at <= window_s for at in times_s) / (window_s - begin_s)
