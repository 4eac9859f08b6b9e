"""Every fault planted into the machines is found, within a small search or a few walks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.testing.explore import walk
from pd_grpc.testing.explorer.scenario import SMALL, Scenario
from pd_grpc.testing.explorer.search import Found, Search
from pd_grpc.testing.explorer.world import World
from tests.testing.planted import ALL, NO_FENCE, planted
from tests.testing.planting import Planted

pytestmark = pytest.mark.longest

WALKS = 60


def hunt(scenario: Scenario, states: int = 6000, faults: int = 2) -> list[Found]:
    """What is found first, by a short search and then by walks."""
    coarse = World(replace(scenario, fine=False))
    searched = Search(coarse, faults, stop_at_first=True).run(states, 60)
    if searched.found:
        return searched.found
    for seed in range(WALKS):
        if found := walk(scenario, seed).found:
            return list(found)
    return []


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Planted) -> None:
    with planted(fault):
        found = hunt(fault.scenario, fault.states, fault.faults)

    assert found, f"nobody noticed that {fault.name}"
    assert found[0].moves


def test_without_fences_a_message_for_a_dead_process_is_obeyed_by_its_successor() -> None:
    with planted(*NO_FENCE):
        found = hunt(SMALL)

    assert found


def test_at_least_sixty_are_planted_and_none_twice() -> None:
    names = {fault.name for fault in ALL}
    assert len(names) == len(ALL) >= 60
