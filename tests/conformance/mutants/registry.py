"""Planted faults: one for each case, which must be found by that case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


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
        """For pytest: (case id, mutant)."""
        return [
            pytest.param(case_id, mutant, id=f"{case_id}-{mutant.name}")
            for case_id, mutants in sorted(self.by_case.items())
            for mutant in mutants
        ]
