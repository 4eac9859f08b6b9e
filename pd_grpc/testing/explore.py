"""Explores what P, D and the router do in every order of events, in one thread and virtual time.

`explore` searches breadth first, then walks at random. `replay` makes the moves of a violation
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from pd_grpc.testing.explorer.report import Report
from pd_grpc.testing.explorer.scenario import ALL, Scenario
from pd_grpc.testing.explorer.search import Search, Searched
from pd_grpc.testing.explorer.walks import Walked, replay, walk
from pd_grpc.testing.explorer.world import World

__all__ = ["DEFAULT_STATES", "MOST_FAULTS", "Report", "explore", "replay", "walk"]

DEFAULT_STATES = 1_600_000
MOST_FAULTS = 2
"""Faults on one path of a search."""


def explore(
    states: int = DEFAULT_STATES,
    seconds: float = 3600.0,
    walks: int = 0,
    seed: int = 0,
    scenarios: Sequence[Scenario] = ALL,
    most_faults: int = MOST_FAULTS,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Search `states` states, shared between the scenarios, in at most `seconds`; then take `walks`
    walks through the scenarios in turn, the first by `seed`, the next by the number after it."""
    report = Report(seed=seed)
    began = monotonic()
    for i, scenario in enumerate(scenarios):
        left = len(scenarios) - i
        share = (states - report.states) // left
        share_s = max(0.0, seconds - (monotonic() - began)) / left
        if share > 0 and share_s > 0:
            report.searches.append(_searched(scenario, i, share, share_s, most_faults))
            tell(f"scenario {i}: {report.searches[-1].states} states")
    began = monotonic()
    for n in range(walks):
        number = n % len(scenarios)
        walked = walk(replace(scenarios[number], fine=True), seed + n, number=number)
        _count(report, seed + n, walked)
    report.walk_seconds = monotonic() - began
    return report


def _searched(
    scenario: Scenario, number: int, states: int, seconds: float, most_faults: int
) -> Searched:
    return Search(World(scenario), most_faults, number).run(states, seconds)


def _count(report: Report, seed: int, walked: Walked) -> None:
    report.walks += 1
    report.walk_moves += len(walked.moves)
    report.walk_faults += walked.faults
    report.walk_found += [(seed, found) for found in walked.found]
