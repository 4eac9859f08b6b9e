"""What an exploration came to, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pd_grpc.testing.explorer.search import Found, Searched


@dataclass
class Report:
    """One exploration: a search of each scenario, and walks from `seed` on."""

    searches: list[Searched] = field(default_factory=list)
    walks: int = 0
    walk_moves: int = 0
    walk_faults: int = 0
    walk_seconds: float = 0.0
    seed: int = 0
    walk_found: list[tuple[int, Found]] = field(default_factory=list)
    """Each with the seed that replays it."""

    @property
    def states(self) -> int:
        """Distinct states, over all scenarios."""
        return sum(searched.states for searched in self.searches)

    @property
    def seconds(self) -> float:
        """How long the searches took."""
        return sum(searched.seconds for searched in self.searches)

    @property
    def found(self) -> list[Found]:
        """Every violation."""
        searched = [found for each in self.searches for found in each.found]
        return searched + [found for _, found in self.walk_found]

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "states": self.states,
            "moves": sum(searched.moves for searched in self.searches),
            "seconds": round(self.seconds, 3),
            "states_per_s": round(self.states / self.seconds) if self.seconds else 0,
            "searches": [
                {
                    "states": each.states,
                    "moves": each.moves,
                    "seconds": round(each.seconds, 3),
                    "steps_of_machines": each.steps_of_machines,
                    "local_states": each.local_states,
                    "layers": [asdict(layer) for layer in each.layers],
                }
                for each in self.searches
            ],
            "walks": self.walks,
            "walk_moves": self.walk_moves,
            "walk_faults": self.walk_faults,
            "walk_seconds": round(self.walk_seconds, 3),
            "seed": self.seed,
            "violations": [
                *({**asdict(found), "seed": None} for s in self.searches for found in s.found),
                *({**asdict(found), "seed": seed} for seed, found in self.walk_found),
            ],
        }

    def lines(self) -> list[str]:
        """For people."""
        rate = self.states / self.seconds if self.seconds else 0.0
        lines = [f"{self.states} states in {self.seconds:.1f} s, {rate:.0f} states/s"]
        for i, searched in enumerate(self.searches):
            for faults, layer in enumerate(searched.layers):
                whole = "all of them" if layer.whole else "not all"
                lines.append(
                    f"  scenario {i}, {faults} faults: {layer.states} states looked at, "
                    f"depth {layer.depth}, {whole}"
                )
        if self.walks:
            lines.append(
                f"{self.walks} walks from seed {self.seed}: {self.walk_moves} moves, "
                f"{self.walk_faults} faults, {self.walk_seconds:.1f} s"
            )
        lines.append(f"{len(self.found)} violations")
        for searched in self.searches:
            lines += [line for found in searched.found for line in _told(found, None)]
        lines += [line for seed, found in self.walk_found for line in _told(found, seed)]
        return lines


def _told(found: Found, seed: int | None) -> list[str]:
    where = f"scenario {found.scenario}" + ("" if seed is None else f", seed {seed}")
    return [
        f"{found.invariant}: {found.text}",
        f"  {where}, {found.faults} faults, {len(found.moves)} moves:",
        *(f"    {move}" for move in found.moves),
    ]
