"""Planted faults: one for each case, which must be found by that case."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]

SHARE = 5
"""`make test` looks for every fifth planted fault, `make planted` for all of them."""


@dataclass(frozen=True)
class Mutant:
    """A server with a fault: what is planted before it starts, and how it is configured."""

    name: str
    plant: Plant
    settings: dict[str, Any] = field(default_factory=dict)


class Mutants:
    """The faults of one role, by the case that must find them. A fault may be planted for several
    cases, and a case have several faults."""

    def __init__(self) -> None:
        self.by_case: dict[str, list[Mutant]] = {}

    def __call__(self, *case_ids: str, **settings: Any) -> Callable[[Plant], Plant]:
        """Register a fault for cases; `settings` go into the server's configuration."""

        def register(plant: Plant) -> Plant:
            for case_id in case_ids:
                mutant = Mutant(plant.__name__, plant, settings)
                self.by_case.setdefault(case_id, []).append(mutant)
            return plant

        return register

    def params(self) -> list[Any]:
        """For pytest: (case id, mutant); those beyond the share are marked `soak`."""
        return [
            _param(case_id, mutant)
            for case_id, mutants in sorted(self.by_case.items())
            for mutant in mutants
        ]


def _param(case_id: str, mutant: Mutant) -> Any:
    name = f"{case_id}-{mutant.name}"
    # By the name, so that the share stays what it is when a fault is added.
    beyond = zlib.crc32(name.encode()) % SHARE != 0
    return pytest.param(case_id, mutant, id=name, marks=[pytest.mark.soak] if beyond else [])
