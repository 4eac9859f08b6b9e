"""The stages of one request as bars, in the order in which its time was spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rich.text import Text

_WIDTH = 44
_IN_TURN = ("route", "queue", "prepare", "compute", "first_token")
"""Stages that follow one another and add up to the time to first token."""


class Bar(NamedTuple):
    """A stage: when it began and how long it took, in ms."""

    stage: str
    start_ms: float
    length_ms: float


def bars(timings_ms: Mapping[str, float]) -> list[Bar]:
    """The stages up to the second token. `allocate` lies within prepare, at its end; the exposed
    part of sending the KV begins where compute ends, beside the first token."""
    found: list[Bar] = []
    at = 0.0
    for stage in _IN_TURN:
        length = timings_ms.get(stage, 0.0)
        found.append(Bar(stage, at, length))
        at += length
        if stage == "prepare":
            allocate = min(timings_ms.get("allocate", 0.0), length)
            found.append(Bar("allocate", at - allocate, allocate))
        if stage == "compute":
            sending = Bar("exposed_send", at, timings_ms.get("exposed_send", 0.0))
    return [*found, sending]


def time_to_first_token_ms(timings_ms: Mapping[str, float]) -> float:
    """Sum of the stages that precede the first token."""
    return sum(timings_ms.get(stage, 0.0) for stage in _IN_TURN)


def waterfall(timings_ms: Mapping[str, float]) -> Text:
    """Lines with one bar per stage, all on one time axis; no line ends with blanks."""
    rows = bars(timings_ms)
    end = max(bar.start_ms + bar.length_ms for bar in rows) or 1.0
    names = max(len(bar.stage) for bar in rows)
    numbers = max(len(f"{bar.length_ms:.1f}") for bar in rows)
    lines = [Text(f"{'stage':<{names}}  {'ms':>{numbers}}", style="bold")]
    for bar in rows:
        before = round(bar.start_ms / end * _WIDTH)
        length = max(1, round(bar.length_ms / end * _WIDTH)) if bar.length_ms else 0
        line = Text(f"{bar.stage:<{names}}  {bar.length_ms:>{numbers}.1f}")
        if length:
            line.append(" " * (2 + min(before, _WIDTH - length)))
            style = "dim" if bar.stage in ("allocate", "exposed_send") else "cyan"
            line.append("█" * length, style=style)
        lines.append(line)
    return Text("\n", no_wrap=True).join(lines)
