"""What a planted fault is: something that a machine does instead of what it must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from pd_grpc.testing.explorer.scenario import SMALL, Scenario

IN_CHUNKS = Scenario(
    prefills=1, decodes=1, requests=((0, (0,)),), prompts=(5,), chunk_tokens=2, decode_blocks=4
)


PREEMPTING = Scenario(
    prefills=1,
    decodes=1,
    requests=((0, (0,)), (0, (0,))),
    max_tokens=5,
    prefill_blocks=8,
    decode_blocks=6,
)
"""Two requests that outgrow their D."""


def with_only(scenario: Scenario, *faults: str) -> Scenario:
    """The scenario in which nothing else goes wrong."""
    return replace(scenario, faults=faults)


class Planted(NamedTuple):
    """A fault: what it replaces, and where it shows."""

    name: str
    owner: Any
    attribute: str
    instead: Callable[..., Any]
    scenario: Scenario = SMALL
    states: int = 6000
    faults: int = 2
    """How many states are searched for it, and most faults on a path."""


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def nothing_done(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def after(original: Callable[..., Any], more: Callable[..., Any]) -> Callable[..., Any]:
    """The original, and then more."""

    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        more(self, *args, **kwargs)
        return found

    return both
