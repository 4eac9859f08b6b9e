"""Any order of grants, refusals, silences and cancels: a model that knows only who came when, and
what each D has said, watches every turn that the pool gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pd_grpc.prefill.prepare import PreparePool
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from tests.prefill.limits import limits

DECODES = ("a", "b", "c")
LOST = Fault(Reason.DECODE_LOST, "gone")

decodes = st.sampled_from(DECODES)
which = st.integers(0, 11)

T = TypeVar("T")


def _one(of: Sequence[T], which: int) -> T:
    return of[which % len(of)]


class Pool(RuleBasedStateMachine):
    """The pool, and beside it the lists that its promises are about."""

    @initialize(
        window=st.integers(1, 4),
        total=st.integers(1, 12),
        ahead=st.integers(1, 5),
        jitter=st.floats(0, 1),
    )
    def begin(self, window: int, total: int, ahead: int, jitter: float) -> None:
        self.limits = limits(window, total, ahead, backoff_max_s=2.0, breaker_max_s=1.0)
        self.jitter = jitter
        self.pool = PreparePool(self.limits, lambda: jitter)
        self.now = 0.0
        self.count = 0
        self.waiting: dict[str, list[TransferKey]] = {d: [] for d in DECODES}
        self.asking: dict[str, list[TransferKey]] = {d: [] for d in DECODES}
        self.granted: dict[str, list[TransferKey]] = {d: [] for d in DECODES}
        self.arrival: dict[TransferKey, int] = {}
        self.told: set[TransferKey] = set()
        """Of whom the pool must say in this turn that their D may not be asked."""
        self.reachable = dict.fromkeys(DECODES, True)
        self.backs_off = dict.fromkeys(DECODES, 0.0)
        """The end of each back-off."""
        # The earliest and the latest end of the time that a breaker is open.
        self.open = dict.fromkeys(DECODES, (0.0, 0.0))
        self.broken = dict.fromkeys(DECODES, False)
        self.forgettable = dict.fromkeys(DECODES, False)

    # --- requests come and go ------------------------------------------------------------------

    @rule(decode=decodes, number=st.integers(1, 4))
    def come(self, decode: str, number: int) -> None:
        for _ in range(number):
            self.count += 1
            key = TransferKey(f"t-{self.count}", 1)
            assert self.pool.enqueue(decode, key, self.now) == len(self.waiting[decode])
            self.waiting[decode].append(key)
            self.arrival[key] = self.count
            if self.now < self.backs_off[decode] or self._is_open(decode):
                self.told.add(key)
        self._turn()

    @precondition(lambda self: self.arrival)
    @rule(which=which)
    def cancel(self, which: int) -> None:
        key = _one(sorted(self.arrival), which)
        self._forget(key)
        self.pool.withdraw(key)
        self.pool.withdraw(key)
        self._turn()

    def _forget(self, key: TransferKey) -> None:
        del self.arrival[key]
        for place in (self.waiting, self.asking, self.granted):
            for keys in place.values():
                if key in keys:
                    keys.remove(key)

    # --- Ds answer, or do not ------------------------------------------------------------------

    @precondition(lambda self: any(self.asking.values()))
    @rule(which=which)
    def grant(self, which: int) -> None:
        decode, key = self._asking(which)
        self._heard(decode)
        self.pool.answered(key, granted=True)
        self.asking[decode].remove(key)
        self.granted[decode].append(key)
        self._turn()

    @precondition(lambda self: any(self.asking.values()))
    @rule(which=which, told_s=st.sampled_from([None, 0.5, 60.0]))
    def is_full(self, which: int, told_s: float | None) -> None:
        decode, key = self._asking(which)
        self._heard(decode)
        self.pool.answered(key, granted=False)
        self._forget(key)
        self.pool.back_off(decode, Fault(Reason.NO_BLOCKS, "", retry_after_s=told_s), self.now)
        wait_s = min(0.25 if told_s is None else told_s, 2.0)
        ends = self.now + wait_s * (1 + self.limits.backoff_jitter * self.jitter)
        self.backs_off[decode] = max(self.backs_off[decode], ends)
        self.told.update(self.waiting[decode])
        self._turn()

    @precondition(lambda self: any(self.asking.values()))
    @rule(which=which, asks_first=st.booleans())
    def is_lost(self, which: int, asks_first: bool) -> None:
        decode, key = self._asking(which)
        self.pool.failed(decode, LOST, self.now)
        self.broken[decode] = True
        self.forgettable[decode] = False
        limits = self.limits
        self.open[decode] = (self.now + limits.breaker_open_s, self.now + limits.breaker_max_s)
        self.pool.answered(key, granted=False)
        self._forget(key)
        self.told.update(self.waiting[decode])
        if asks_first:
            self._start()
        self._turn()

    @precondition(lambda self: any(self.asking.values()))
    @rule(which=which, heard=st.booleans())
    def asks_again(self, which: int, heard: bool) -> None:
        """Its session is gone; D has said so, or somebody else."""
        decode, key = self._asking(which)
        if heard:
            self._heard(decode)
        self.pool.ask_again(key)
        self.asking[decode].remove(key)
        self.waiting[decode] = sorted([*self.waiting[decode], key], key=self.arrival.__getitem__)
        if self.now < self.backs_off[decode] or self._is_open(decode):
            self.told.add(key)
        self._turn()

    @precondition(lambda self: any(self.granted.values()))
    @rule(which=which)
    def compute(self, which: int) -> None:
        key = _one([key for keys in self.granted.values() for key in keys], which)
        self.pool.computed(key)
        self._forget(key)
        self._turn()

    @rule(decode=decodes, there=st.booleans())
    def session(self, decode: str, there: bool) -> None:
        self.reachable[decode] = there
        if there:
            self.pool.reached(decode, self.now)
            earliest, latest = self.open[decode]
            self.open[decode] = (min(self.now, earliest), min(self.now, latest))
        self._turn()

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.7, 3.0]))
    def wait(self, seconds: float) -> None:
        self._tick(self.now + seconds)
        self._turn()

    @precondition(lambda self: self.pool.next_wake() is not None)
    @rule()
    def wake(self) -> None:
        wake = self.pool.next_wake()
        assert wake is not None and wake >= self.now
        self._tick(wake)
        self._turn()

    def _tick(self, now: float) -> None:
        """Time passes. Where a back-off ends, those that wait out another hear of it."""
        if any(self.now < ends <= now for ends in self.backs_off.values()):
            still = [d for d in DECODES if now < self.backs_off[d]]
            self.told.update(key for d in still for key in self.waiting[d])
        self.now = now
        self.pool.tick(now)

    @rule(number=st.integers(1, 3))
    def pause(self, number: int) -> None:
        """Pause, let some come, and resume."""
        before = {d: list(keys) for d, keys in self.asking.items()}
        self.pool.paused = True
        self.come("a", number)
        assert self.asking == before
        self.pool.paused = False
        self._turn()

    def _asking(self, which: int) -> tuple[str, TransferKey]:
        return _one([(d, key) for d in DECODES for key in self.asking[d]], which)

    def _heard(self, decode: str) -> None:
        self.pool.heard(decode)
        self.broken[decode] = False

    def _is_open(self, decode: str) -> bool:
        """For certain; a breaker that has failed more than once is open for longer."""
        return (
            self.broken[decode] and not self.forgettable[decode] and self.now < self.open[decode][0]
        )

    def _share(self, decode: str) -> int:
        sharing = sum(bool(self.granted[other]) or other == decode for other in DECODES)
        return max(1, -(-self.limits.ahead // sharing))

    # --- turns ---------------------------------------------------------------------------------

    def _turn(self) -> None:
        """As the machine does after each event."""
        self._turn_away()
        self._start()
        for d in DECODES:
            idle = not (self.waiting[d] or self.asking[d] or self.granted[d])
            if idle and self.now >= self.open[d][1]:
                # Of a D that nobody wants the pool need not know for ever what broke it.
                self.forgettable[d] = True

    def _turn_away(self) -> None:
        """Whoever waits for a D that is behind its breaker leaves, as the machine has them do."""
        held_back = self.pool.held_back(self.now)
        assert self.told <= {key for key, _ in held_back}, "not told that its D may not be asked"
        self.told.clear()
        for key, fault in held_back:
            decode = next(d for d in DECODES if key in self.waiting[d])
            if not self.pool.admits(decode, self.now):
                assert fault is LOST
                self._forget(key)
                self.pool.withdraw(key)
            else:
                assert fault.reason is Reason.NO_BLOCKS, "a D that may be asked holds nobody back"
        for d in DECODES:
            assert not self.waiting[d] or self.pool.admits(d, self.now), "nobody waits for it"
            if self.now >= max(self.backs_off[d], self.open[d][1]):
                assert self.pool.takes(d, self.now), "not asked though its time is over"
            elif self.now < self.backs_off[d]:
                assert not self.pool.takes(d, self.now), "asked before its back-off is over"
                assert self.pool.next_wake() is not None, "nobody looks when its time is over"

    def _start(self) -> None:
        started = self.pool.start(self.reachable.__getitem__, self.now)
        assert not (started and self.pool.paused)
        probing = {d: any(map(self.pool.probes, self.asking[d])) for d in DECODES}
        for key in started:
            decode = next(d for d in DECODES if key in self.waiting[d])
            older = [
                d
                for d in DECODES
                if self._may_ask(d, probing[d])
                and self.arrival[self.waiting[d][0]] < self.arrival[key]
            ]
            assert not older, "of those that may ask the oldest asks first, whatever its D"
            probing[decode] = self.pool.probes(key)
            assert key == self.waiting[decode][0], "first in, first out for each D"
            assert self.reachable[decode]
            assert self.now >= self.backs_off[decode], "asked before its back-off was over"
            assert not self._is_open(decode), "asked while its breaker is open"
            if self.broken[decode] and not self.forgettable[decode]:
                assert self.pool.probes(key), "only a probe goes while the breaker is not closed"
            assert len(self.granted[decode]) < self._share(decode), "more than its share"
            left = self.limits.total - sum(map(len, self.asking.values()))
            assert len(self.asking[decode]) < left, "as much as it has is left to the others"
            self.waiting[decode].remove(key)
            self.asking[decode].append(key)
        self._nobody_waits_without_need()

    def _nobody_waits_without_need(self) -> None:
        if not self.pool.paused:
            for d in DECODES:
                probing = any(map(self.pool.probes, self.asking[d]))
                assert not self._may_ask(d, probing), f"{d} could be asked"

    def _may_ask(self, decode: str, probing: bool) -> bool:
        """Whether somebody waits for a D and could ask it."""
        left = self.limits.total - sum(map(len, self.asking.values()))
        return (
            bool(self.waiting[decode])
            and self.reachable[decode]
            and self.pool.takes(decode, self.now)
            and len(self.asking[decode]) < min(self.limits.window, left)
            and len(self.granted[decode]) < self._share(decode)
            and not (self.broken[decode] and probing)
        )

    # --- always --------------------------------------------------------------------------------

    @invariant()
    def windows_hold_and_nothing_is_lost(self) -> None:
        if not hasattr(self, "pool"):
            return
        lanes = {lane.endpoint: lane for lane in self.pool.lanes(self.now)}
        for d in DECODES:
            counted = (len(self.waiting[d]), len(self.asking[d]), len(self.granted[d]))
            lane = lanes.get(d)
            told = (lane.waiting, lane.in_flight, lane.ready) if lane else (0, 0, 0)
            assert told == counted
            assert len(self.asking[d]) <= self.limits.window
            assert self.pool.waiting_for(d) == len(self.waiting[d])
        assert self.pool.in_flight == sum(map(len, self.asking.values())) <= self.limits.total
        assert self.pool.granted == sum(map(len, self.granted.values()))

    def teardown(self) -> None:
        """In the end every D is well: each request that is left gets its turn."""
        if not hasattr(self, "pool"):
            return
        self.pool.paused = False
        self.reachable = dict.fromkeys(DECODES, True)
        for _ in range(2 * self.count + 10):
            self.now += 3.0
            self.pool.tick(self.now)
            self._start()
            for d in DECODES:
                for key in [*self.asking[d]]:
                    self.pool.heard(d)
                    self.broken[d] = False
                    self.pool.answered(key, granted=True)
                    self.asking[d].remove(key)
                    self.granted[d].append(key)
                for key in [*self.granted[d]]:
                    self.pool.computed(key)
                    self._forget(key)
        assert not self.arrival, "nobody is left behind"
        self.now += 10.0
        self.pool.tick(self.now)
        assert self.pool.next_wake() is None


@pytest.mark.timeout(120)
def test_no_order_of_events_breaks_a_promise_of_the_pool() -> None:
    """A failure is shown as it was found; add Phase.shrink to have it made small, in minutes."""
    # On a busy machine making an example takes as long as it takes.
    how = settings(
        max_examples=300,
        stateful_step_count=50,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(Pool, settings=how)
