"""Letting go of a call at the moment when its answer is on its way."""

from __future__ import annotations

import random


class Aim:
    """How long to wait before a call is given up, learnt from what came of those before.

    The machine decides how long an answer takes, and how long it takes today; so one that was given
    up too early moves the aim a little later, one that was answered first a little earlier. Each
    shot goes off by up to `spread_s` to either side. Seconds.
    """

    def __init__(self, at_s: float, spread_s: float, step_s: float, seed: int) -> None:
        self._at_s = at_s
        self._spread_s = spread_s
        self._step_s = step_s
        self._chance = random.Random(seed)

    def next(self) -> float:
        """When to give up the next one."""
        return max(0.0, self._at_s + self._chance.uniform(-self._spread_s, self._spread_s))

    def early(self) -> None:
        """D had not granted it yet."""
        self._at_s += self._step_s

    def late(self) -> None:
        """The answer was there before."""
        self._at_s = max(0.0, self._at_s - self._step_s)
