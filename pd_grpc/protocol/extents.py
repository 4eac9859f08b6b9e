"""Stretches of a pool's memory, as (start, end) in bytes."""

from __future__ import annotations

from collections.abc import Sequence


def joined(starts: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Pieces of `size` bytes, given by where they start, as (start, end), those that lie one behind
    another made one."""
    found: list[tuple[int, int]] = []
    for at in starts:
        if found and found[-1][1] == at:
            found[-1] = found[-1][0], at + size
        else:
            found.append((at, at + size))
    return found
