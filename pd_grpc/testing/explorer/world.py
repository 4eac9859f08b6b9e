"""The world: processes, the wire between them, and everything that can happen next.

A state is a tuple of small numbers: a state of each process, the wire, who is frozen, and who was
touched by a fault. A process that is down is a negative number, its number of crashes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

from pd_grpc.testing.explorer.agreement import disagreements
from pd_grpc.testing.explorer.answers import (
    GRAVE,
    LASTING,
    MENDABLE,
    RAISED,
    SILENT,
    broken_promises,
)
from pd_grpc.testing.explorer.call_faults import call_faults
from pd_grpc.testing.explorer.cast import cast_of, watches_of
from pd_grpc.testing.explorer.locals import Locals
from pd_grpc.testing.explorer.process import Input, Looks, Process, Violation
from pd_grpc.testing.explorer.process_faults import process_faults
from pd_grpc.testing.explorer.routes import route_of
from pd_grpc.testing.explorer.scenario import FIRST_EPOCH, Scenario
from pd_grpc.testing.explorer.strays import strays
from pd_grpc.testing.explorer.wire import (
    LEND,
    OPENED,
    POSTED,
    STALLED,
    WAITS,
    WRITE,
    Interned,
    Line,
    Op,
    Wire,
    WireRules,
    only_tells,
)

State: TypeAlias = tuple[int, ...]
Move: TypeAlias = tuple[Any, ...]

PATIENCE = 400
"""How often time may pass before everything that was begun must have ended."""

LONGEST_END = 4000
"""Moves after which somebody must be going round in circles."""

_ENGINES = 16
"""Where the bits of engines that hang begin, after those of frozen processes."""

_ENDS = ("restart", "thaw", "resume", "return")
"""Moves that end a fault."""


class World:
    """Everything that can happen in a scenario."""

    def __init__(self, scenario: Scenario, merge: bool = True) -> None:
        self.scenario = scenario
        self.ids = Interned()
        self.rules = WireRules(self.ids)
        self.locals = Locals(merge)
        self.names = scenario.names
        self._index = {name: i for i, name in enumerate(self.names)}
        self._first_client = scenario.first_client
        self.routes = [
            route_of(self._index, self._first_client + i, wish.pairing)
            for i, wish in enumerate(scenario.wishes())
        ]
        self._wires: list[Wire] = []
        self._wire_numbers: dict[Wire, int] = {}
        self._begun: dict[tuple[int, int], int] = {}
        self._good: set[State] = set()
        self._telling: dict[int, bool] = {}
        self._made = cast_of(scenario, self.ids)

    def root(self) -> State:
        """Everybody is up, and nothing has been asked yet."""
        count = len(self.names)
        touched = (1 | GRAVE) * self.scenario.heir
        for _, client in self.scenario.poisons:
            touched |= 1 << self._index[client] | GRAVE | RAISED
        watches = [
            Line(call, (), (), OPENED | WAITS) for call in watches_of(self.scenario, self.ids)
        ]
        wire = self._wire(tuple(sorted(watches)))
        return (*(self._begin(i, 0) for i in range(count)), wire, 0, touched)

    # --- looking ---------------------------------------------------------------------------------

    def wire(self, state: State) -> Wire:
        """What is on its way."""
        return self._wires[state[-3]]

    def looks(self, state: State, i: int) -> Looks | None:
        """What a process looks like; None while it is down."""
        return self.locals.all[state[i]].looks if state[i] >= 0 else None

    def process(self, state: State, name: str) -> Process:
        """A process that is up, to be looked at."""
        return self.locals.process(state[self._index[name]])

    def known_as(self, name: str) -> str:
        """What a process of P is called by those that it talks to."""
        heir = self.scenario.heir and name == self.names[1]
        return self.names[0] if heir else name

    def frozen(self, state: State, i: int) -> bool:
        """Whether a process is stopped."""
        return bool(state[-2] >> i & 1)

    def hangs(self, state: State, i: int) -> bool:
        """Whether a process's engine does not come back."""
        return bool(state[-2] >> (i + _ENGINES) & 1)

    def runs(self, state: State, i: int) -> bool:
        """Whether a process is up and not stopped."""
        return state[i] >= 0 and not self.frozen(state, i)

    def settled(self, state: State) -> bool:
        """Whether everything is over: nothing but idle sessions is left."""
        if state[-2] or any(
            looks is not None and not looks.settled
            for looks in (self.looks(state, i) for i in range(len(self.names)))
        ):
            return False
        return all(self._idles(state, line) for line in self.wire(state))

    def _idles(self, state: State, line: Line) -> bool:
        who = self.ids.calls[line.call]
        waits = line.flags & WAITS and state[self._index[who.server]] < 0
        return (
            who.kind in ("session", "watch", LEND) and not line.down and bool(waits or not line.up)
        )

    # --- what can happen -------------------------------------------------------------------------

    def moves(self, state: State) -> list[Move]:
        """What can happen without a fault."""
        found: list[Move] = []
        for line in self.wire(state):
            who = self.ids.calls[line.call]
            if line.flags & STALLED:
                continue
            for way, queue, who_hears in (
                ("up", line.up, who.server),
                ("down", line.down, who.client),
            ):
                waits = line.flags & (POSTED | WAITS) and state[self._index[who_hears]] < 0
                if queue and not waits and not self.frozen(state, self._index[who_hears]):
                    found.append((way, line.call))
                    tells = who.kind == "watch" or self._only_tells(queue[0])
                    if tells and not self.scenario.fine:
                        return found[-1:]
        for i in range(len(self.names)):
            if self.runs(state, i):
                steps = self.locals.all[state[i]].looks.steps
                stops = ("step", "land") if self.hangs(state, i) else ()
                found += [(step, i) for step in steps if step not in stops]
        if not found and self._wake_s(state) is not None:
            found.append(("pass",))
        return found + self._ends_of_faults(state)

    def _only_tells(self, message: int) -> bool:
        found = self._telling.get(message)
        if found is None:
            found = self._telling[message] = only_tells(self.ids.messages[message])
        return found

    def _ends_of_faults(self, state: State) -> list[Move]:
        found: list[Move] = []
        for i in range(len(self.names)):
            if state[i] < 0:
                found.append(("restart", i))
                continue
            if self.frozen(state, i):
                found.append(("thaw", i))
            if self.hangs(state, i):
                found.append(("return", i))
        found += [("resume", line.call) for line in self.wire(state) if line.flags & STALLED]
        return found

    def is_quiet(self, moves: list[Move]) -> bool:
        """Whether nothing happens, of all these moves, unless time passes or a fault ends."""
        return not moves or moves[0][0] in ("pass", *_ENDS)

    def faults(self, state: State) -> list[Move]:
        """What can go wrong."""
        kinds, found = self.scenario.faults, list[Move]()
        for line in self.wire(state):
            found += call_faults(self.ids, line, kinds)
        for i in range(len(self.names)):
            if not self.runs(state, i):
                continue
            looks = self.locals.all[state[i]].looks
            if i < self._first_client:
                found += process_faults(looks, i, self._index, kinds, self.hangs(state, i))
            elif "leave" in kinds and not looks.settled:
                found.append(("leave", i))
        return found

    def label(self, move: Move) -> str:
        """A move in words that mean the same in every run."""
        kind, *what = move
        if kind in ("up", "down", "lose", "stall", "resume", "repeat", "corrupt"):
            return f"{kind} {self.ids.calls[what[0]]}"
        if kind == "crash":
            return f"crash {self.names[what[0]]} {'late' if what[1] else 'at once'}"
        return " ".join([kind, *(self.names[i] for i in what)])

    # --- what comes of it ------------------------------------------------------------------------

    def after(self, state: State, move: Move) -> tuple[State, tuple[Violation, ...]]:
        """The state that a move leads to, and what is wrong with it."""
        after, violations = self._after(state, move)
        if self.scenario.one_sided and not violations:
            violations = tuple(strays(self, after))
        return after, violations

    def _after(self, state: State, move: Move) -> tuple[State, tuple[Violation, ...]]:
        kind = move[0]
        if kind in ("up", "down"):
            return self._deliver(state, move[1], kind == "up")
        if kind == "pass":
            return self._pass(state), ()
        wire = self.wire(state)
        if kind in ("lose", "repeat", "stall", "resume", "corrupt"):
            return self._on_the_wire(state, wire, kind, move[1]), ()
        i = move[1]
        if kind == "restart":
            return self._with(state, i, self._begin(i, -state[i])), ()
        if kind in ("freeze", "thaw", "hang", "return"):
            bit = 1 << (i + _ENGINES if kind in ("hang", "return") else i)
            silent = GRAVE | SILENT | LASTING if kind in ("freeze", "hang") else 0
            return (*state[:-2], state[-2] ^ bit, state[-1] | 1 << i | silent), ()
        if kind == "crash":
            wire = self.rules.crashed(wire, self.names[i], move[2])
            crashes = 1 + self.locals.process(state[i]).epoch - FIRST_EPOCH
            gone = self._with(state, i, -crashes, wire)
            stopped = gone[-2] & ~(1 << i | 1 << i + _ENGINES)
            return (*gone[:-2], stopped, gone[-1] | 1 << i | GRAVE), ()
        if kind in ("spoil", "poison"):
            # It is that of the client whose row it is, and nobody else's.
            state = (*state[:-1], state[-1] | 1 << move[2] | GRAVE | RAISED)
            return self._happen(state, i, (kind, self.names[move[2]]))
        if kind in ("leave", "fail", "drain"):
            raised = GRAVE | RAISED if kind == "fail" else GRAVE
            state = (*state[:-1], state[-1] | 1 << i | raised)
        return self._happen(state, i, (kind,))

    def _deliver(self, state: State, call: int, up: bool) -> tuple[State, tuple[Violation, ...]]:
        who = self.ids.calls[call]
        i = self._index[who.server if up else who.client]
        wire = self.wire(state)
        if state[i] < 0:
            return self._with(state, i, state[i], self.rules.refused(wire, call)), ()
        wire, message = self.rules.delivered(wire, call, up)
        heard = self._with(state, i, state[i], wire)
        return self._happen(heard, i, ("up" if up else "down", call, message))

    def _happen(self, state: State, i: int, happens: Input) -> tuple[State, tuple[Violation, ...]]:
        after, ops, violations = self.locals.step(state[i], happens)
        if not ops:
            return self._with(state, i, after), violations
        state = self._with(state, i, after, self.rules.perform(self.wire(state), ops))
        for op in ops:
            if op.kind == WRITE:
                state, stray = self._write_into(state, op)
                violations += stray
        return state, violations

    def _write_into(self, state: State, op: Op) -> tuple[State, tuple[Violation, ...]]:
        """A write lands in the memory of the process that it is meant for, if that is there."""
        i = self._index[self.ids.calls[op.call].server]
        looks = self.looks(state, i)
        if looks is None or looks.facts[0] != self.ids.messages[op.message].body.epoch:
            return state, ()
        after, _, violations = self.locals.step(state[i], ("write", op.message))
        return self._with(state, i, after), violations

    def _on_the_wire(self, state: State, wire: Wire, kind: str, call: int) -> State:
        if kind == "lose":
            wire = self.rules.lost(wire, call)
        elif kind == "repeat":
            wire = self.rules.repeated(wire, call)
        elif kind == "corrupt":
            wire = self.rules.corrupted(wire, call)
        else:
            wire = self.rules.stalled(wire, call, kind == "stall")
        touched = state[-1]
        who = self.ids.calls[call]
        if kind in ("stall", "corrupt") or (kind == "lose" and who.kind not in MENDABLE):
            touched |= GRAVE
        if kind == "stall":
            touched |= SILENT | LASTING if who.kind == "session" else SILENT
        for name in (who.client, who.server):
            touched |= 1 << self._index[name]
        return (*state[:-3], self._wire(wire), state[-2], touched)

    def _wake_s(self, state: State) -> float | None:
        wakes = [
            self.locals.all[state[i]].looks.wake_s
            for i in range(len(self.names))
            if self.runs(state, i)
        ]
        return min((at for at in wakes if at is not None), default=None)

    def _pass(self, state: State) -> State:
        wake_s = self._wake_s(state)
        assert wake_s is not None and wake_s > 0
        moved = [
            number if number < 0 else self.locals.step(number, ("elapse", wake_s))[0]
            for number in state[: len(self.names)]
        ]
        return (*moved, *state[-3:])

    def _with(self, state: State, i: int, local: int, wire: Wire | None = None) -> State:
        number = state[-3] if wire is None else self._wire(wire)
        return (*state[:i], local, *state[i + 1 : -3], number, state[-2], state[-1])

    def _wire(self, wire: Wire) -> int:
        number = self._wire_numbers.get(wire)
        if number is None:
            number = self._wire_numbers[wire] = len(self._wires)
            self._wires.append(wire)
        return number

    def _begin(self, i: int, crashes: int) -> int:
        number = self._begun.get((i, crashes))
        if number is None or not self.locals.merges:
            make = partial(self._made[i], FIRST_EPOCH + crashes)
            number = self._begun[i, crashes] = self.locals.begin(make)
        return number

    # --- what must hold in quiet, and at the end -------------------------------------------------

    def wrong_in_quiet(self, state: State) -> list[Violation]:
        """What somebody does not know though nothing is on its way."""
        return disagreements(self, state)

    def wrong_at_the_end(self, state: State, faults: int) -> tuple[list[Move], list[Violation]]:
        """Let every fault end and time pass until everything is over: what is wrong then or on the
        way, with so many faults before, and the moves to there."""
        path: list[Move] = []
        trail: list[State] = []
        passes = 0
        while state not in self._good:
            trail.append(state)
            if self.settled(state):
                break
            moves = self.moves(state)
            ends = [m for m in moves if m[0] in ("thaw", "resume", "return")]
            going = [m for m in moves if m[0] != "restart"]
            if not going or passes > PATIENCE or len(path) > LONGEST_END:
                return path, [*self._left_over(state, "everything ends")]
            move = ends[0] if ends else going[0]
            passes += move[0] == "pass"
            path.append(move)
            state, violations = self.after(state, move)
            if violations:
                return path, list(violations)
        if trail and state not in self._good:
            left = self._left_over(state, "everything is returned")
            left += broken_promises(self, state, faults)
            if left:
                return path, left
        if self.locals.merges:
            self._good.update(trail)
        return path, []

    def _left_over(self, state: State, invariant: str) -> list[Violation]:
        found = []
        for i in range(len(self.names)):
            if state[i] >= 0:
                left = self.locals.process(state[i]).left_over()
                found += [Violation(invariant, each) for each in left]
        if not found and invariant == "everything ends":
            found.append(Violation(invariant, "nothing can happen, and it is not over"))
        return found
