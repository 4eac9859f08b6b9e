"""Any order of grants, refusals, silences and cancels: a model that knows only who came when, and
what each D has said, watches every turn that the pool gives."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pd_grpc.prefill.prepare import PrepareLimits, PreparePool
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey

DECODES = ("a", "b", "c")
LOST = Fault(Reason.DECODE_LOST, "gone")

decodes = st.sampled_from(DECODES)
pick = st.randoms(use_true_random=False)


class Pool(RuleBasedStateMachine):
    """The pool, and beside it the lists that its promises are about."""

    @initialize(
        window=st.integers(1, 4),
        total=st.integers(1, 6),
        ahead=st.integers(1, 5),
        jitter=st.floats(0, 1),
    )
    def begin(self, window: int, total: int, ahead: int, jitter: float) -> None:
        self.limits = PrepareLimits(window, total, ahead, backoff_max_s=2.0, breaker_max_s=1.0)
        self.pool = PreparePool(self.limits, lambda: jitter)
        self.now = 0.0
        self.count = 0
        self.waiting: dict[str, list[TransferKey]] = {d: [] for d in DECODES}
        self.asking: dict[str, list[TransferKey]] = {d: [] for d in DECODES}
        self.granted: dict[str, list[TransferKey]] = {d: [] for d in DECODES}
        self.arrival: dict[TransferKey, int] = {}
        self.not_before = dict.fromkeys(DECODES, 0.0)
        self.reachable = dict.fromkeys(DECODES, True)
        self.broken = dict.fromkeys(DECODES, False)

    # --- requests come and go ------------------------------------------------------------------

    @rule(decode=decodes)
    def come(self, decode: str) -> None:
        self.count += 1
        key = TransferKey(f"t-{self.count}", 1)
        assert self.pool.enqueue(decode, key, self.now) == len(self.waiting[decode])
        self.waiting[decode].append(key)
        self.arrival[key] = self.count

    @precondition(lambda self: self.arrival)
    @rule(random=pick)
    def cancel(self, random: Random) -> None:
        key = random.choice(sorted(self.arrival))
        self._forget(key)
        self.pool.withdraw(key)
        self.pool.withdraw(key)

    def _forget(self, key: TransferKey) -> None:
        del self.arrival[key]
        for place in (self.waiting, self.asking, self.granted):
            for keys in place.values():
                if key in keys:
                    keys.remove(key)

    # --- Ds answer, or do not ------------------------------------------------------------------

    @precondition(lambda self: any(self.asking.values()))
    @rule(random=pick, kind=st.sampled_from(["grant", "full", "end", "lost", "again"]))
    def answer(self, random: st.random.Random, kind: str) -> None:  # type: ignore[name-defined]
        decode = random.choice([d for d in DECODES if self.asking[d]])
        key = random.choice(self.asking[decode])
        if kind == "lost":
            self.pool.failed(decode, LOST, self.now)
            self.broken[decode] = True
        else:
            self.pool.heard(decode)
            self.broken[decode] = False
        if kind == "grant":
            self.pool.answered(key, granted=True)
            self.asking[decode].remove(key)
            self.granted[decode].append(key)
        elif kind == "again":
            self.pool.ask_again(key)
            self.asking[decode].remove(key)
            self.waiting[decode] = sorted(
                [*self.waiting[decode], key], key=self.arrival.__getitem__
            )
        else:
            self.pool.answered(key, granted=False)
            self._forget(key)
        if kind == "full":
            told_s = random.choice([None, 0.5, 60.0])
            self.pool.back_off(decode, Fault(Reason.NO_BLOCKS, "", retry_after_s=told_s), self.now)
            least_s = min(0.25 if told_s is None else told_s, 2.0)
            self.not_before[decode] = max(self.not_before[decode], self.now + least_s)

    @precondition(lambda self: any(self.granted.values()))
    @rule(random=pick)
    def compute(self, random: Random) -> None:
        decode = random.choice([d for d in DECODES if self.granted[d]])
        key = random.choice(self.granted[decode])
        self.pool.computed(key)
        self._forget(key)

    @rule(decode=decodes, there=st.booleans())
    def session(self, decode: str, there: bool) -> None:
        self.reachable[decode] = there
        if there:
            self.pool.reached(decode, self.now)

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.7, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pool.tick(self.now)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.pool.paused = paused

    # --- turns ---------------------------------------------------------------------------------

    @rule()
    def turn_away(self) -> None:
        """Whoever waits for a D that is behind its breaker leaves, as the machine has them do."""
        for key, fault in self.pool.held_back(self.now):
            decode = next(d for d in DECODES if key in self.waiting[d])
            if not self.pool.admits(decode, self.now):
                assert fault is LOST
                self._forget(key)
                self.pool.withdraw(key)
            else:
                assert fault.reason is Reason.NO_BLOCKS, "a D that may be asked holds nobody back"

    @rule()
    def start(self) -> None:
        started = self.pool.start(self.reachable.__getitem__, self.now)
        assert not (started and self.pool.paused)
        for key in started:
            decode = next(d for d in DECODES if key in self.waiting[d])
            assert key == self.waiting[decode][0], "first in, first out for each D"
            assert self.reachable[decode]
            assert self.now >= self.not_before[decode], "asked before its back-off was over"
            if self.broken[decode]:
                assert self.pool.probes(key), "only a probe goes while the breaker is not closed"
            self.waiting[decode].remove(key)
            self.asking[decode].append(key)
        in_order = [self.arrival[key] for key in started]
        if not any(self.broken.values()) and self._nobody_is_limited():
            assert in_order == sorted(in_order), "the oldest asks first, whatever its D"
        self._nobody_waits_without_need()

    def _nobody_is_limited(self) -> bool:
        return all(len(self.asking[d]) < self.limits.window for d in DECODES)

    def _nobody_waits_without_need(self) -> None:
        if self.pool.paused or self.pool.in_flight >= self.limits.total:
            return
        for d in DECODES:
            sharing = sum(bool(self.granted[other]) or other == d for other in DECODES)
            share = max(1, -(-self.limits.ahead // sharing))
            held = (
                not self.reachable[d]
                or not self.pool.takes(d, self.now)
                or len(self.asking[d]) >= self.limits.window
                or len(self.granted[d]) >= share
                or any(self.pool.probes(key) for key in self.asking[d])
            )
            assert held or not self.waiting[d], f"{d} could be asked"

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
            self.start()
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
        self.now += 10
        self.pool.tick(self.now)
        assert self.pool.next_wake() is None


@pytest.mark.timeout(180)
def test_no_order_of_events_breaks_a_promise_of_the_pool() -> None:
    # On a busy machine making an example takes as long as it takes.
    how = settings(
        max_examples=60,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(Pool, settings=how)
