"""Requests that D prefills itself, who gives way to whom, and steps that go wrong over one row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.decode.scheduler import Scheduler
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Reason
from pd_grpc.testing.explore import explore, replay, walk
from pd_grpc.testing.explorer.client_process import ClientProcess
from pd_grpc.testing.explorer.decode_process import DecodeProcess
from pd_grpc.testing.explorer.scenario import (
    ALIKE_AND_SPOILT,
    ALONE,
    AT_ONE_P,
    BESIDE,
    LOCAL,
    ONE_AT_A_TIME,
    OUTCAST,
    ROWS,
    Scenario,
)

pytestmark = pytest.mark.longest

OK, RAISED = "ok", Reason.ENGINE_ERROR.name


def answers(scenario: Scenario, seed: int, most_faults: int = 5) -> tuple[bool, list[str]]:
    """Whether something went wrong on a walk, and how each request ended; every block is back."""
    scenario = replace(scenario, fine=True)
    walked = walk(scenario, seed, most_faults=most_faults, chance=0.2)
    assert not walked.found, walked
    world, state, _ = replay(scenario, walked.moves)
    clients = [world.process(state, name) for name in world.names[scenario.first_client :]]
    d = world.process(state, "d1")
    assert isinstance(d, DecodeProcess) and d.pool.free == d.pool.total
    results = [each.result for each in clients if isinstance(each, ClientProcess)]
    return walked.faults > 0, results


@pytest.mark.parametrize("scenario", [*LOCAL, *ROWS, ALIKE_AND_SPOILT])
def test_nothing_goes_wrong_in_a_short_search_with_faults(scenario: Scenario) -> None:
    report = explore(states=3_000, scenarios=[scenario], most_faults=2)

    assert not report.found, "\n".join(report.lines())
    assert report.states == 3_000


@pytest.mark.parametrize("scenario", [ALONE, BESIDE, ONE_AT_A_TIME])
def test_without_a_fault_everybody_has_an_answer(scenario: Scenario) -> None:
    assert [answers(replace(scenario, faults=()), seed) for seed in range(10)] == [
        (False, [OK, OK])
    ] * 10


def test_prompts_and_answers_give_way_on_the_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    gave_way: set[tuple[DecodeState, bool]] = set()
    right = Scheduler._put_off

    def noted(self: Scheduler, victim: Any) -> None:
        gave_way.add((victim.state, victim.local))
        right(self, victim)

    monkeypatch.setattr(Scheduler, "_put_off", noted)
    for seed in range(30):
        for scenario in (ALONE, BESIDE):
            answers(replace(scenario, faults=()), seed)
    assert gave_way >= {
        (DecodeState.RECEIVING, True),
        (DecodeState.DECODING, True),
        (DecodeState.DECODING, False),
    }


@pytest.mark.parametrize("fault", ["spoil", "poison"])
def test_a_row_that_goes_wrong_fails_its_request_alone(fault: str) -> None:
    """In whatever company it was."""
    scenario = replace(ALONE, prompts=(3, 3), decode_blocks=6, faults=(fault,))
    ends = {tuple(answers(scenario, seed, 1)[1]) for seed in range(40)}

    assert ends == {(OK, OK), (RAISED, OK), (OK, RAISED)}


@pytest.mark.parametrize(
    ("scenario", "end"), [(OUTCAST, [OK, RAISED, OK]), (AT_ONE_P, [OK, RAISED])]
)
def test_who_makes_an_engine_raise_is_found_and_fails_alone(
    scenario: Scenario, end: list[str]
) -> None:
    assert [answers(replace(scenario, faults=()), seed)[1] for seed in range(20)] == [end] * 20
