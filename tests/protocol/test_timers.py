"""Timers against the plainest model of them: a dictionary that is searched."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pd_grpc.protocol.timers import Timers

KEYS = st.sampled_from("abcdef")
TIMES = st.integers(0, 20).map(float)


class AgainstADictionary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.timers = Timers[str]()
        self.model: dict[str, float] = {}

    @rule(key=KEYS, at=TIMES)
    def set(self, key: str, at: float) -> None:
        self.timers.set(key, at)
        self.model[key] = at

    @rule(key=KEYS)
    def cancel(self, key: str) -> None:
        self.timers.cancel(key)
        self.model.pop(key, None)

    @rule(now=TIMES)
    def pop_due(self, now: float) -> None:
        expected = {key: at for key, at in self.model.items() if at <= now}
        due = self.timers.pop_due(now)
        assert sorted(due) == sorted(expected)
        fired_at = [expected[key] for key in due]
        assert fired_at == sorted(fired_at)
        for key in due:
            del self.model[key]

    @invariant()
    def they_agree(self) -> None:
        assert len(self.timers) == len(self.model)
        assert self.timers.next() == min(self.model.values(), default=None)
        assert {key: self.timers.at(key) for key in self.model} == self.model


TestAgainstADictionary = AgainstADictionary.TestCase


def test_a_timer_that_is_moved_fires_once_and_at_its_last_time() -> None:
    timers = Timers[str]()
    for at in (5.0, 9.0, 5.0, 7.0):
        timers.set("lease", at)
    assert timers.pop_due(6.9) == []
    assert timers.pop_due(7.0) == ["lease"]
    assert timers.pop_due(100.0) == []


def test_timers_of_one_moment_fire_in_the_order_they_were_set() -> None:
    timers = Timers[str]()
    for key in "cab":
        timers.set(key, 1.0)
    assert timers.pop_due(1.0) == ["c", "a", "b"]


def test_a_cancelled_timer_that_is_set_again_fires_once() -> None:
    timers = Timers[str]()
    timers.set("a", 1.0)
    timers.cancel("a")
    timers.cancel("never set")
    timers.set("a", 1.0)
    assert timers.pop_due(1.0) == ["a"]
    assert timers.next() is None


def test_a_lease_renewed_for_ever_takes_no_more_room() -> None:
    timers = Timers[str]()
    for renewal in range(10_000):
        timers.set("lease", float(renewal))
    # What was superseded lies in the heap until it is compacted; that is the room in question.
    assert len(timers._heap) < 100
    assert timers.pop_due(9999.0) == ["lease"]
