"""Requests to be sent: how long their prompts and answers are."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple


class Length(NamedTuple):
    """Tokens of a prompt, and of its answer with the first token."""

    prompt: int
    output: int


_SPREAD = 0.3
"""Sigma of the lengths' logarithm: 95% lie between 0.55 and 1.8 times the median."""
_SHORTEST, _LONGEST = 0.25, 2.0
"""Lengths are kept within these multiples of the mean."""


def spread_lengths(
    requests: int, prompt_tokens: int, output_tokens: int, seed: int = 1
) -> list[Length]:
    """Lengths that average exactly so, lognormal and clipped; the same for the same seed."""
    draw = random.Random(seed)
    prompts = _spread(draw, requests, prompt_tokens)
    outputs = _spread(draw, requests, output_tokens)
    return [Length(*pair) for pair in zip(prompts, outputs, strict=True)]


def _spread(draw: random.Random, count: int, mean: int) -> list[int]:
    location = math.log(mean) - _SPREAD**2 / 2
    low, high = max(1, int(_SHORTEST * mean)), max(1, int(_LONGEST * mean))
    values = [
        min(high, max(low, round(draw.lognormvariate(location, _SPREAD)))) for _ in range(count)
    ]
    missing = count * mean - sum(values)
    # One at a time over those that have room, so that no length stands out.
    step = 1 if missing > 0 else -1
    at = 0
    while missing:
        if low <= values[at % count] + step <= high:
            values[at % count] += step
            missing -= step
        at += 1
    return values


def poisson_arrivals(rate_per_s: float, seconds: float, seed: int = 1) -> list[float]:
    """Times of arrival within `seconds`, in order."""
    draw = random.Random(seed)
    at, times = draw.expovariate(rate_per_s), []
    while at < seconds:
        times.append(at)
        at += draw.expovariate(rate_per_s)
    return times


def mean_lengths(lengths: Sequence[Length]) -> tuple[float, float]:
    """Mean prompt and mean answer, tokens."""
    count = len(lengths)
    return sum(x.prompt for x in lengths) / count, sum(x.output for x in lengths) / count
