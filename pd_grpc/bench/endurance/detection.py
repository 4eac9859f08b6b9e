"""How soon the router noticed that something was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOOKED_FOR_S = 5.0
"""So long after a harm began may be what comes of it."""


@dataclass(frozen=True)
class Harm:
    """Something the router ought to notice: of which instance, when it began, in monotonic seconds,
    and what it is in words."""

    instance: str
    began_at: float
    what: str


def detection_times(
    harms: Sequence[Harm], changes: Sequence[tuple[float, str, bool]]
) -> tuple[list[float], list[str]]:
    """Seconds from the beginning of each harm until the router took the instance for not ready, and
    what it did not within `LOOKED_FOR_S`. `changes` are (time, instance, ready)."""
    times, unnoticed = [], []
    for harm in harms:
        noticed = [
            at
            for at, name, ready in changes
            if name == harm.instance and not ready and 0 <= at - harm.began_at <= LOOKED_FOR_S
        ]
        if noticed:
            times.append(min(noticed) - harm.began_at)
        else:
            unnoticed.append(harm.what)
    return times, unnoticed
