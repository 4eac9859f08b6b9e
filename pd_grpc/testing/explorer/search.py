"""Breadth first through everything that can happen: first without a fault, then with one, and so
on, so that each violation is found with the fewest faults and the fewest steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from pd_grpc.testing.explorer.process import Violation
from pd_grpc.testing.explorer.world import Move, State, World


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
        """Search until so many states are seen, the time is over, or there are no more."""
        world, result, began = self.world, self.result, monotonic()
        root = world.root()
        self._note(root, -1, ())
        frontier: deque[tuple[State, int]] = deque([(root, 0)])
        for faults in range(self._most_faults + 1):
            layer = Layer()
            result.layers.append(layer)
            later: deque[tuple[State, int]] = deque()
            while frontier:
                over = len(self._seen) >= states or monotonic() - began > seconds
                if over or (self._stop_at_first and result.found):
                    break
                state, depth = frontier.popleft()
                layer.states += 1
                layer.depth = max(layer.depth, depth)
                self._expand(state, depth, faults, frontier, later, layer)
            else:
                layer.whole = True
                frontier = later
                continue
            break
        result.states = len(self._seen)
        result.moves = sum(layer.moves for layer in result.layers)
        result.seconds = monotonic() - began
        result.steps_of_machines = world.locals.steps_taken
        result.local_states = len(world.locals.all)
        return result

    def _expand(
        self,
        state: State,
        depth: int,
        faults: int,
        frontier: deque[tuple[State, int]],
        later: deque[tuple[State, int]],
        layer: Layer,
    ) -> None:
        world, number = self.world, self._seen[state]
        if world.settled(state):
            path, wrong = world.wrong_at_the_end(state)
            self._report(number, path, wrong, faults)
            return
        moves = world.moves(state)
        if world.is_quiet(moves):
            wrong = world.wrong_in_quiet(state)
            self._report(number, [], wrong, faults)
            path, wrong = world.wrong_at_the_end(state)
            self._report(number, path, wrong, faults)
        for move in moves:
            layer.moves += 1
            after, violations = world.after(state, move)
            if violations:
                self._report(number, [move], list(violations), faults)
            elif after not in self._seen:
                self._note(after, number, move)
                frontier.append((after, depth + 1))
        if faults == self._most_faults:
            return
        for move in world.faults(state):
            later_state = (state, move)
            layer.moves += 1
            after, violations = world.after(*later_state)
            if violations:
                self._report(number, [move], list(violations), faults + 1)
            elif after not in self._seen:
                self._note(after, number, move)
                later.append((after, depth + 1))

    def _note(self, state: State, before: int, move: Move) -> None:
        self._seen[state] = len(self._came_from)
        self._came_from.append(before)
        self._by_move.append(move)

    def _report(self, number: int, path: list[Move], wrong: list[Violation], faults: int) -> None:
        for violation in wrong:
            kind = (violation.invariant, violation.text.partition(":")[0])
            if kind in self._kinds:
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
