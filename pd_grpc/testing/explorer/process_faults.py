"""What can go wrong with one P or D."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pd_grpc.testing.explorer.process import Looks


def process_faults(
    looks: Looks, i: int, numbers: Mapping[str, int], kinds: tuple[str, ...], hangs: bool
) -> Iterator[tuple[Any, ...]]:
    """Of these kinds, those that can happen to process `i` now; `numbers` are those of all."""
    if "crash" in kinds:
        yield ("crash", i, True)
        yield ("crash", i, False)
    if "freeze" in kinds:
        yield ("freeze", i)
    if "drain" in kinds and looks.may_drain:
        yield ("drain", i)
    if hangs:
        return
    if "step" in looks.steps and "fail" in kinds:
        yield ("fail", i)
    if "hang" in kinds and {"step", "land"} & set(looks.steps):
        yield ("hang", i)
    for client, gets_token in looks.rows:
        if "poison" in kinds:
            yield ("poison", i, numbers[client])
        if "spoil" in kinds and gets_token:
            yield ("spoil", i, numbers[client])
