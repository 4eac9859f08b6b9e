"""Whose turn it is to ask, as rules alone."""

from __future__ import annotations

from pd_grpc.prefill.prepare import PreparePool
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from tests.prefill.limits import limits

NOW = 1000.0


def key(n: int) -> TransferKey:
    return TransferKey(f"t-{n}", 1)


def fill(pool: PreparePool, endpoint: str, numbers: range) -> None:
    for n in numbers:
        pool.enqueue(endpoint, key(n), NOW)


def test_each_d_has_a_window_and_all_have_a_total() -> None:
    pool = PreparePool(limits(window=2, total=3, ahead=100))
    fill(pool, "a", range(4))
    fill(pool, "b", range(10, 14))
    assert pool.start(lambda _: True, NOW) == [key(0), key(1), key(10)]
    assert (pool.in_flight, pool.waiting_for("a"), pool.waiting_for("b")) == (3, 2, 3)
    assert pool.start(lambda _: True, NOW) == []


def test_many_ds_that_do_not_answer_leave_some_of_the_total_to_one_that_does() -> None:
    """S2, invariant 8: a window of each of eight would be all there is."""
    pool = PreparePool(limits(window=32, total=256, ahead=100))
    for n in range(10):
        fill(pool, f"silent-{n}", range(1000 * n, 1000 * n + 100))
        pool.start(lambda _: True, NOW)
    fill(pool, "free", range(10_000, 10_100))
    started = pool.start(lambda _: True, NOW)
    assert started and pool.in_flight < 256
    for each in started:
        pool.answered(each, granted=False)
    assert len(pool.start(lambda _: True, NOW)) == len(started), "and it keeps that"


def test_a_total_smaller_than_a_window_is_shared_too() -> None:
    pool = PreparePool(limits(window=32, total=4, ahead=100))
    fill(pool, "silent", range(8))
    fill(pool, "free", range(8, 10))
    assert pool.start(lambda _: True, NOW) == [key(0), key(1), key(8)]
    pool = PreparePool(limits(window=1, total=1, ahead=1))
    fill(pool, "alone", range(2))
    assert pool.start(lambda _: True, NOW) == [key(0)]


def test_a_d_whose_window_is_full_holds_up_no_other() -> None:
    pool = PreparePool(limits(window=2, total=100, ahead=100))
    fill(pool, "silent", range(50))
    fill(pool, "free", range(50, 52))
    assert pool.start(lambda _: True, NOW) == [key(0), key(1), key(50), key(51)]


def test_the_oldest_asks_first_whatever_its_d() -> None:
    pool = PreparePool(limits(window=10, total=1, ahead=100))
    for n, endpoint in enumerate(["a", "b", "a"]):
        pool.enqueue(endpoint, key(n), NOW)
    order = []
    for _ in range(3):
        (started,) = pool.start(lambda _: True, NOW)
        order.append(started)
        pool.answered(started, granted=False)
    assert order == [key(0), key(1), key(2)]


def test_none_asks_a_d_that_cannot_be_asked() -> None:
    pool = PreparePool(limits(window=10, total=10, ahead=100))
    fill(pool, "away", range(2))
    fill(pool, "here", range(2, 3))
    assert pool.start(lambda endpoint: endpoint == "here", NOW) == [key(2)]
    assert pool.waiting_for("away") == 2


def test_grants_not_yet_computed_are_bounded_and_asking_does_not_count() -> None:
    pool = PreparePool(limits(window=10, total=20, ahead=2))
    fill(pool, "a", range(6))
    assert len(pool.start(lambda _: True, NOW)) == 6
    for n in range(2):
        pool.answered(key(n), granted=True)
    fill(pool, "a", range(6, 7))
    assert (pool.granted, pool.start(lambda _: True, NOW)) == (2, [])
    pool.computed(key(0))
    assert pool.start(lambda _: True, NOW) == [key(6)]


def test_a_request_that_is_withdrawn_leaves_nothing_behind() -> None:
    pool = PreparePool(limits(window=1, total=1, ahead=1))
    fill(pool, "a", range(3))
    pool.start(lambda _: True, NOW)
    pool.withdraw(key(1))
    pool.withdraw(key(0))
    assert pool.start(lambda _: True, NOW) == [key(2)]
    pool.answered(key(2), granted=True)
    pool.withdraw(key(2))
    assert (pool.in_flight, pool.granted, pool.waiting_for("a")) == (0, 0, 0)


def test_grants_that_pile_up_for_one_decode_hold_back_no_other() -> None:
    """S1, invariant 8."""
    pool = PreparePool(limits(window=8, total=64, ahead=4))
    fill(pool, "slow", range(8))
    for started in pool.start(lambda _: True, NOW):
        pool.answered(started, granted=True)
    assert pool.granted >= 4 and pool.start(lambda _: True, NOW) == []
    fill(pool, "free", range(8, 10))
    assert pool.start(lambda _: True, NOW) == [key(8), key(9)]


def test_a_decode_that_grants_nothing_takes_no_share_of_what_is_prepared_ahead() -> None:
    """S2, invariant 8: that of the others is as large as without it."""
    pool = PreparePool(limits(window=8, total=64, ahead=4))
    fill(pool, "full", range(8))
    pool.start(lambda _: True, NOW)
    for n in range(8, 12):
        fill(pool, "free", range(n, n + 1))
        assert pool.start(lambda _: True, NOW) == [key(n)]
        pool.answered(key(n), granted=True)
    fill(pool, "free", range(12, 13))
    assert pool.start(lambda _: True, NOW) == []


def test_who_waits_out_a_back_off_hears_that_another_d_may_be_asked_again() -> None:
    pool = PreparePool(limits(window=8, total=8, ahead=4, backoff_jitter=0.0))
    for endpoint, wait_s in (("a", 4.0), ("b", 1.0)):
        pool.back_off(endpoint, Fault(Reason.NO_BLOCKS, endpoint, retry_after_s=wait_s), NOW)
    fill(pool, "a", range(1))
    assert [who for who, _ in pool.held_back(NOW)] == [key(0)]
    pool.tick(NOW + 0.5)
    assert pool.held_back(NOW + 0.5) == []
    pool.tick(NOW + 1)
    assert [who for who, _ in pool.held_back(NOW + 1)] == [key(0)]
    pool.failed("c", Fault(Reason.DECODE_LOST, "gone"), NOW + 1)
    pool.held_back(NOW + 1)
    pool.reached("c", NOW + 1.1)
    assert [who for who, _ in pool.held_back(NOW + 1.1)] == [key(0)]


def test_who_asks_again_hears_that_its_d_may_not_be_asked_meanwhile() -> None:
    pool = PreparePool(limits(window=8, total=8, ahead=4))
    fill(pool, "a", range(2))
    pool.start(lambda _: True, NOW)
    lost = Fault(Reason.DECODE_LOST, "gone")
    pool.failed("a", lost, NOW)
    pool.answered(key(0), granted=False)
    assert pool.held_back(NOW) == []
    pool.ask_again(key(1))
    assert pool.held_back(NOW) == [(key(1), lost)]
