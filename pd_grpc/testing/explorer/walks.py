"""Random walks by seed, for what lies deeper than a search goes, and walks along a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from pd_grpc.testing.explorer.process import Violation
from pd_grpc.testing.explorer.scenario import Scenario
from pd_grpc.testing.explorer.search import Found
from pd_grpc.testing.explorer.world import Move, State, World

LONGEST = 600
"""Moves of a walk before it is brought to its end."""


@dataclass(frozen=True)
class Walked:
    """What a walk came to: its moves in words, and what was wrong."""

    moves: tuple[str, ...]
    faults: int
    found: tuple[Found, ...]


class NoSuchMove(Exception):
    """A move that cannot be made where the list has it."""


def walk(
    scenario: Scenario, seed: int, most_faults: int = 5, number: int = 0, chance: float = 0.06
) -> Walked:
    """Go wherever the seed says, with a fault now and then, and then to the end."""
    random = Random(seed)
    world = World(scenario, merge=False)
    state = world.root()
    labels: list[str] = []
    faults = 0
    for _ in range(LONGEST):
        if world.settled(state):
            break
        moves = world.moves(state)
        wrong = _wrong_here(world, state, moves)
        if wrong:
            return _walked(labels, faults, wrong, number)
        going_wrong = world.faults(state) if random.random() < chance else []
        if faults < most_faults and going_wrong:
            move = random.choice(going_wrong)
            faults += 1
        elif moves:
            move = random.choice(moves)
        else:
            break
        labels.append(world.label(move))
        state, violations = world.after(state, move)
        if violations:
            return _walked(labels, faults, violations, number)
    path, wrong = world.wrong_at_the_end(state, faults)
    return _walked([*labels, *map(world.label, path)], faults, wrong, number)


def replay(scenario: Scenario, moves: Sequence[str]) -> tuple[World, State, list[Violation]]:
    """Make the moves of a list, up to the first thing that is wrong. NoSuchMove when the list does
    not belong to the scenario, or to these machines."""
    world = World(scenario, merge=False)
    state = world.root()
    faults = 0
    for i, label in enumerate(moves):
        wrong = _wrong_here(world, state, world.moves(state))
        if wrong:
            return world, state, wrong
        going_wrong = world.faults(state)
        choices = [*world.moves(state), *going_wrong]
        chosen = [move for move in choices if world.label(move) == label]
        if not chosen:
            raise NoSuchMove(f"move {i}, {label!r}, is none of {[*map(world.label, choices)]}")
        faults += chosen[0] in going_wrong
        state, violations = world.after(state, chosen[0])
        if violations:
            return world, state, list(violations)
    wrong = _wrong_here(world, state, world.moves(state))
    return world, state, wrong or world.wrong_at_the_end(state, faults)[1]


def _wrong_here(world: World, state: State, moves: list[Move]) -> list[Violation]:
    return world.wrong_in_quiet(state) if world.is_quiet(moves) else []


def _walked(labels: list[str], faults: int, violations: Sequence[Violation], number: int) -> Walked:
    moves = tuple(labels)
    found = tuple(Found(v.invariant, v.text, number, moves, faults) for v in violations)
    return Walked(moves, faults, found)
