"""The shell that every machine needs: events in one at a time, actions out, one timer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.posting import post

E = TypeVar("E")
A_co = TypeVar("A_co", covariant=True)
E_contra = TypeVar("E_contra", contravariant=True)
A = TypeVar("A")


class Machine(Protocol[E_contra, A_co]):
    """Rules without a loop, a thread or a clock: times are seconds of one monotonic clock."""

    def handle(self, event: E_contra, now: float) -> Sequence[A_co]:
        """Take in what happened, and say what is to be done."""
        ...

    def tick(self, now: float) -> Sequence[A_co]:
        """Let time pass, and say what is to be done."""
        ...

    def next_wake(self) -> float | None:
        """When `tick` must be called at the latest; None when nothing waits for time."""
        ...


class Driver(Generic[E, A]):
    """Drives a machine on the loop that makes it.

    What carrying an action out makes happen at once is taken in afterwards, never in between.
    """

    def __init__(
        self,
        machine: Machine[E, A],
        clock: Clock,
        perform: Callable[[Sequence[A], float], None],
        before: Callable[[E, float], None] = lambda event, now: None,
    ) -> None:
        """`perform` carries actions out; `before` sees each event before the machine does."""
        self._machine = machine
        self._clock = clock
        self._perform = perform
        self._before = before
        self._loop = asyncio.get_running_loop()
        self._pending: deque[E | None] = deque()
        self._feeding = False
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, event: E) -> None:
        """Let something happen; on the loop."""
        self._take(event)

    def feed_from_thread(self, event: E) -> None:
        """Let something happen; from any thread. Nothing happens once the loop has ended."""
        post(self._loop, self.feed, event)

    def wake(self) -> None:
        """Let time pass; on the loop."""
        self._take(None)

    def stop(self) -> None:
        """Set no timer any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take(self, event: E | None) -> None:
        self._pending.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._pending:
                self._step(self._pending.popleft())
        finally:
            self._feeding = False
        self._rearm()

    def _step(self, event: E | None) -> None:
        now = self._clock.now()
        if event is None:
            self._perform(self._machine.tick(now), now)
            return
        self._before(event, now)
        self._perform(self._machine.handle(event, now), now)

    def _rearm(self) -> None:
        self.stop()
        at = self._machine.next_wake()
        if at is not None:
            self._timer = self._loop.call_later(max(0.0, at - self._clock.now()), self.wake)
