"""The breaker of one D, as rules alone."""

from __future__ import annotations

import pytest

from pd_grpc.prefill.breaker import Breaker, BreakerState
from pd_grpc.protocol.faults import Fault, Reason

LOST = Fault(Reason.DECODE_LOST, "gone")
OPEN_S, MAX_S = 1.0, 5.0


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(OPEN_S, MAX_S)


def test_it_is_closed_until_a_failure_and_open_for_its_time(breaker: Breaker) -> None:
    assert breaker.state(0) is BreakerState.CLOSED
    breaker.failed(LOST, 10)
    assert breaker.fault is LOST
    assert (breaker.state(10.9), breaker.left_s(10.75)) == (BreakerState.OPEN, 0.25)
    assert (breaker.state(11), breaker.left_s(11)) == (BreakerState.HALF_OPEN, 0)


def test_each_probe_that_fails_doubles_its_time_up_to_a_bound(breaker: Breaker) -> None:
    now, lengths = 0.0, []
    for _ in range(5):
        breaker.failed(LOST, now)
        lengths.append(breaker.left_s(now))
        now = breaker.until
    assert lengths == [1, 2, 4, 5, 5]


def test_failures_of_calls_under_way_when_it_opened_change_nothing(breaker: Breaker) -> None:
    breaker.failed(LOST, 0)
    breaker.failed(Fault(Reason.ENGINE_STUCK, "later"), 0.5)
    assert (breaker.until, breaker.fault) == (1.0, LOST)


def test_an_answer_closes_it_and_the_next_failure_starts_anew(breaker: Breaker) -> None:
    breaker.failed(LOST, 0)
    breaker.failed(LOST, 1)
    breaker.answered()
    assert (breaker.state(1), breaker.fault) == (BreakerState.CLOSED, None)
    breaker.failed(LOST, 2)
    assert breaker.until == 3.0


def test_a_connection_lets_the_probe_go_at_once(breaker: Breaker) -> None:
    breaker.failed(LOST, 0)
    breaker.reached(0.25)
    assert breaker.state(0.25) is BreakerState.HALF_OPEN


def test_what_d_said_of_its_return_is_kept_within_the_bound(breaker: Breaker) -> None:
    breaker.failed(Fault(Reason.DRAINING, "leaving", retry_after_s=3), 0)
    assert breaker.until == 3.0
    breaker.answered()
    breaker.failed(Fault(Reason.DRAINING, "leaving", retry_after_s=300), 0)
    assert breaker.until == MAX_S
