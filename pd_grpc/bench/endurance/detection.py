"""How soon the router noticed that something was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Harm:
    """Something the router ought to notice: of which instance, when it began and when it was put
    right, in monotonic seconds."""

    instance: str
    began_at: float
    over_at: float


def detection_times(
    harms: Sequence[Harm], changes: Sequence[tuple[float, str, bool]]
) -> tuple[list[float], int]:
    """Seconds from the beginning of each harm until the router took the instance for not ready, and
    how many it never did. `changes` are (time, instance, ready)."""
    times = []
    for harm in harms:
        noticed = [
            at
            for at, name, ready in changes
            if name == harm.instance and not ready and harm.began_at <= at <= harm.over_at
        ]
        if noticed:
            times.append(min(noticed) - harm.began_at)
    return times, len(harms) - len(times)
