"""What processes can become: each state once, each step taken once.

A step of a process depends on nothing but its own state and what happens to it, and no clock is
shared. So the states of a world are made of a few thousand states of each process, and a step that
was taken before is looked up. A state is kept as the list of what happened to the process; the
process itself is made anew from that when it is needed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pd_grpc.testing.explorer.digest import digest_of
from pd_grpc.testing.explorer.process import Input, Looks, Process, Violation
from pd_grpc.testing.explorer.wire import Op

Make = Callable[[], Process]
Step = tuple[int, tuple[Op, ...], tuple[Violation, ...]]


@dataclass
class Local:
    """One state of one process: `make` begins it, `before` and `happened` lead to it."""

    make: Make
    before: int
    happened: Input
    looks: Looks
    process: Process | None


class Locals:
    """The states of all processes, by number. With `merge` states in which the same can happen are
    one; without, each step makes a new one, which is faster along a single path."""

    def __init__(self, merge: bool) -> None:
        self.all: list[Local] = []
        self.steps_taken = 0
        self.merges = merge
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._steps: dict[tuple[int, Input], Step] = {}

    def begin(self, make: Make) -> int:
        """The first state of a process."""
        return self._number(make(), Local(make, -1, (), Looks((), None, True, ()), None))

    def step(self, number: int, happens: Input) -> Step:
        """What comes of something that happens to a process in a state."""
        known = self._steps.get((number, happens))
        if known is not None:
            return known
        local = self.all[number]
        process = self._process(number)
        ops, violations = process.take(happens)
        self.steps_taken += 1
        after = self._number(process, Local(local.make, number, happens, local.looks, None))
        step = (after, ops, violations)
        if self.merges:
            self._steps[number, happens] = step
        return step

    def process(self, number: int) -> Process:
        """The process in a state, to be looked at."""
        local = self.all[number]
        if local.process is None:
            local.process = self._process(number)
        return local.process

    def _number(self, process: Process, local: Local) -> int:
        if self.merges:
            name = (process.name, digest_of(process, process.now, process.lends))
            number = self._numbers.get(name)
            if number is not None:
                return number
            self._numbers[name] = len(self.all)
        local.looks = process.looks()
        local.process = process
        self.all.append(local)
        return len(self.all) - 1

    def _process(self, number: int) -> Process:
        """The process itself, which the caller may change."""
        local = self.all[number]
        if local.process is not None:
            process, local.process = local.process, None
            return process
        happened = []
        at = number
        while self.all[at].before >= 0:
            happened.append(self.all[at].happened)
            at = self.all[at].before
        process = local.make()
        for happens in reversed(happened):
            process.take(happens)
        return process
