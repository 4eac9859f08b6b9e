"""What the seed workload takes when nothing costs time but steps and waiting for them.

No process, no message and no clock: the reckoning that the fit uses, for it comes out the same on
any machine, and what the measured rows are held against. One P and one D, each of which runs one
step after another; an Allocate is answered at the end of D's step; a request that is handed over
joins D's next step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from pd_grpc.bench.seed_model import CHUNK_TOKENS, PREFILL_BATCH
from pd_grpc.bench.workload import Length
from pd_grpc.engine.step_table import StepTable

POLL_MS = 1.0
"""What polling adds to each reply at the most, and what is reckoned with half of."""


@dataclass(frozen=True)
class Preparing:
    """`at_once` Allocates may wait for D together, none while `ahead` grants are not yet computed;
    each costs `extra_ms` beyond D's own time. `free` ones do not even wait."""

    at_once: int
    ahead: int
    extra_ms: float = 0.0
    free: bool = False


AHEAD = 2 * PREFILL_BATCH
"""Twice P's batch, as `prepare_ahead` is where nothing is said; the same in every row."""
SERIAL = Preparing(1, AHEAD, POLL_MS / 2)
THREADS5 = Preparing(5, AHEAD, POLL_MS / 2)
POOL = Preparing(32, AHEAD)
BOUND = Preparing(1, AHEAD, free=True)


@dataclass
class _Running:
    left: int
    context: int


@dataclass
class SeedModel:
    """The workload on its way. Times are ms since the first request."""

    lengths: Sequence[Length]
    at_once: int
    steps: StepTable
    preparing: Preparing
    prefill_batch: int = PREFILL_BATCH
    chunk_tokens: int = CHUNK_TOKENS
    now: float = 0.0
    _events: list[tuple[float, int, str, list[Length]]] = field(default_factory=list)
    _order: count[int] = field(default_factory=count)
    _waiting: deque[Length] = field(default_factory=deque)
    _asking: list[Length] = field(default_factory=list)
    _in_flight: int = 0
    _granted: int = 0
    _ready: deque[Length] = field(default_factory=deque)
    _computing: bool = False
    _running: list[_Running] = field(default_factory=list)
    _joining: list[_Running] = field(default_factory=list)
    _stepping: bool = False
    _ends: list[float] = field(default_factory=list)

    def run(self) -> list[float]:
        """When each request ends, in order."""
        rest = iter(self.lengths)
        for _ in range(min(self.at_once, len(self.lengths))):
            self._waiting.append(next(rest))
        self._go_on()
        while self._events:
            self.now, _, what, those = heapq.heappop(self._events)
            ended = len(self._ends)
            if what == "granted":
                self._in_flight -= len(those)
                self._granted += len(those)
                self._ready.extend(those)
            elif what == "computed":
                self._computing = False
                self._granted -= len(those)
                self._hand_over(those)
            else:
                self._end_step()
            for _ in range(len(self._ends) - ended):
                if (following := next(rest, None)) is not None:
                    self._waiting.append(following)
            self._go_on()
        return self._ends

    def _at(self, ms: float, what: str, those: list[Length]) -> None:
        heapq.heappush(self._events, (self.now + ms, next(self._order), what, those))

    def _go_on(self) -> None:
        """Let whoever can do something begin."""
        self._ask()
        if not self._computing and self._ready:
            self._compute()
        if not self._stepping:
            self._step()

    def _ask(self) -> None:
        how = self.preparing
        at_once = 0 if how.free else how.at_once
        while how.free and self._waiting and self._granted < how.ahead:
            self._granted += 1
            self._ready.append(self._waiting.popleft())
        while self._waiting and self._in_flight < at_once and self._granted < how.ahead:
            self._in_flight += 1
            self._asking.append(self._waiting.popleft())
        if not self._stepping:
            self._answer()

    def _answer(self) -> None:
        if self._asking:
            self._at(self.preparing.extra_ms, "granted", self._asking)
            self._asking = []

    def _compute(self) -> None:
        batch: list[Length] = []
        tokens = 0
        while self._ready and len(batch) < self.prefill_batch:
            if batch and tokens + self._ready[0].prompt > self.chunk_tokens:
                break
            batch.append(self._ready.popleft())
            tokens += batch[-1].prompt
        self._computing = True
        self._at(self.steps.prefill_ms(tokens), "computed", batch)

    def _hand_over(self, those: list[Length]) -> None:
        for length in those:
            if length.output == 1:
                self._ends.append(self.now)
            else:
                self._joining.append(_Running(length.output - 1, length.prompt))

    def _step(self) -> None:
        self._running += self._joining
        self._joining = []
        if self._running:
            self._stepping = True
            context = sum(each.context for each in self._running)
            self._at(self.steps.decode_ms(len(self._running), context), "stepped", [])

    def _end_step(self) -> None:
        self._stepping = False
        for each in self._running:
            each.left -= 1
            each.context += 1
            if each.left == 0:
                self._ends.append(self.now)
        self._running = [each for each in self._running if each.left]
        # Before the next step begins.
        self._answer()
