"""Breadth first through everything that can happen: first without a fault, then with one, and so
on, so that each violation is found with the fewest faults and the fewest steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic

from pd_grpc.testing.explorer.process import Violation
from pd_grpc.testing.explorer.world import Move, State, World

MOST_FOUND = 50
"""Different violations that one search reports."""


@dataclass(frozen=True)
class Found:
    """A violation, and the moves that lead to it."""

    invariant: str
    text: str
    scenario: int
    moves: tuple[str, ...]
    faults: int


@dataclass
class Layer:
    """What was seen with a number of faults: `whole` says that nothing more is to be seen."""

    states: int = 0
    moves: int = 0
    depth: int = 0
    whole: bool = False


@dataclass
class Searched:
    """What a search came to."""

    states: int = 0
    moves: int = 0
    layers: list[Layer] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    seconds: float = 0.0
    steps_of_machines: int = 0
    local_states: int = 0


class Search:
    """One scenario, breadth first. Each state is looked at once, however it is reached."""

    def __init__(
        self,
        world: World,
        most_faults: int,
        scenario: int = 0,
        stop_at_first: bool = False,
    ) -> None:
        self.world = world
        self.result = Searched()
        self._most_faults = most_faults
        self._scenario = scenario
        self._stop_at_first = stop_at_first
        self._seen: dict[State, int] = {}
        self._came_from: list[int] = []
        self._by_move: list[Move] = []
        self._kinds: set[tuple[str, str]] = set()

    def run(self, states: int, seconds: float) -> Searched:
        """Search until so many states are looked at, the time is over, or there are no more. Each
        number of faults may use up half of what the smaller ones have left of both."""
        world, result, began = self.world, self.result, monotonic()
        self._note(world.root(), -1, ())
        before: list[list[State]] = []
        for faults in range(self._most_faults + 1):
            share = 1 if faults == self._most_faults else 2
            most = (states - result.states) // share
            until = monotonic() + (seconds - (monotonic() - began)) / share
            before, layer = self._layer(faults, before, most, until)
            result.layers.append(layer)
            result.states += layer.states
            result.moves += layer.moves
        result.seconds = monotonic() - began
        result.steps_of_machines = world.locals.steps_taken
        result.local_states = len(world.locals.all)
        return result

    def _layer(
        self, faults: int, before: list[list[State]], most: int, until: float
    ) -> tuple[list[list[State]], Layer]:
        """Every state with so many faults, depth by depth; `before` are the states with one fault
        less, by their depth."""
        layer = Layer()
        depths: list[list[State]] = []
        frontier = [self.world.root()] if faults == 0 else []
        while frontier or len(depths) < len(before) + 1:
            depth = len(depths)
            depths.append([])
            following: list[State] = []
            for state in self._with_faults(before, depth - 1, frontier, layer, faults):
                stop = self._stop_at_first and self.result.found
                if layer.states >= most or stop or monotonic() > until:
                    return depths, layer
                layer.states += 1
                layer.depth = depth
                depths[depth].append(state)
                self._expand(state, faults, following, layer)
            frontier = following
        layer.whole = True
        return depths, layer

    def _with_faults(
        self,
        before: list[list[State]],
        depth: int,
        frontier: list[State],
        layer: Layer,
        faults: int,
    ) -> Iterator[State]:
        """The states of a frontier, then those that a fault leads to from the depth before it."""
        yield from frontier
        if not 0 <= depth < len(before):
            return
        for state in before[depth]:
            if self.world.settled(state):
                continue
            found: list[State] = []
            for move in self.world.faults(state):
                self._make(state, move, faults, found, layer)
            yield from found

    def _expand(self, state: State, faults: int, following: list[State], layer: Layer) -> None:
        """Check a state, and make every move without a fault."""
        world, number = self.world, self._seen[state]
        if world.settled(state):
            path, wrong = world.wrong_at_the_end(state, faults)
            self._report(number, path, wrong, faults)
            return
        moves = world.moves(state)
        if world.is_quiet(moves):
            self._report(number, [], world.wrong_in_quiet(state), faults)
            path, wrong = world.wrong_at_the_end(state, faults)
            self._report(number, path, wrong, faults)
        for move in moves:
            self._make(state, move, faults, following, layer)

    def _make(
        self, state: State, move: Move, faults: int, following: list[State], layer: Layer
    ) -> None:
        layer.moves += 1
        after, violations = self.world.after(state, move)
        if violations:
            self._report(self._seen[state], [move], list(violations), faults)
        elif after not in self._seen:
            self._note(after, self._seen[state], move)
            following.append(after)

    def _note(self, state: State, before: int, move: Move) -> None:
        self._seen[state] = len(self._came_from)
        self._came_from.append(before)
        self._by_move.append(move)

    def _report(self, number: int, path: list[Move], wrong: list[Violation], faults: int) -> None:
        for violation in wrong:
            kind = (violation.invariant, violation.text)
            if kind in self._kinds or len(self._kinds) >= MOST_FOUND:
                continue
            self._kinds.add(kind)
            moves = [*self._way_to(number), *path]
            labels = tuple(self.world.label(move) for move in moves)
            self.result.found.append(
                Found(violation.invariant, violation.text, self._scenario, labels, faults)
            )

    def _way_to(self, number: int) -> list[Move]:
        moves = []
        while self._came_from[number] >= 0:
            moves.append(self._by_move[number])
            number = self._came_from[number]
        return moves[::-1]
