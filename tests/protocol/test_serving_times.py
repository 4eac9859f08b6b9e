"""How long requests have lately needed, and for whom it is too late."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.serving_times import (
    FEWEST,
    MEMORY_S,
    PEERS,
    REMEMBERED,
    Budget,
    Served,
    ServingTimes,
    ServingTimesByPeer,
    too_late,
)

NOW = 1000.0


def known(*took_s: float, quantile: float = 0.95, size: int = 10) -> ServingTimes:
    times = ServingTimes(quantile)
    for seconds in took_s:
        times.finished(Served(0.0, seconds, size), NOW)
    return times


def test_nothing_is_known_of_few() -> None:
    assert known(*[1.0] * (FEWEST - 1)).needed_s(10, NOW) is None
    assert known(*[1.0] * FEWEST).needed_s(10, NOW) == 1.0


def test_one_among_the_fewest_does_not_decide_alone() -> None:
    assert known(9.0, *[1.0] * (FEWEST - 1)).needed_s(10, NOW) == 1.0


def test_a_quantile_of_nothing_knows_nothing() -> None:
    assert known(*[1.0] * REMEMBERED, quantile=0.0).needed_s(10, NOW) is None


@pytest.mark.parametrize(("quantile", "needed"), [(0.5, 10.0), (0.95, 19.0), (1.0, 20.0)])
def test_so_many_took_no_longer(quantile: float, needed: float) -> None:
    times = known(*[float(n) for n in range(20, 0, -1)], quantile=quantile)
    assert times.needed_s(10, NOW) == needed


def test_of_many_ends_the_old_ones_are_forgotten() -> None:
    assert known(*[9.0] * REMEMBERED, *[1.0] * REMEMBERED).needed_s(10, NOW) == 1.0


def test_what_is_long_ago_is_forgotten() -> None:
    times = known(*[9.0] * REMEMBERED)
    assert times.needed_s(10, NOW + MEMORY_S - 1) == 9.0
    assert times.needed_s(10, NOW + MEMORY_S) is None


def test_a_smaller_one_needs_its_part_and_a_larger_one_no_more() -> None:
    times = ServingTimes(0.95)
    for _ in range(FEWEST):
        times.finished(Served(1.0, 4.0, 100), NOW)
    assert [times.needed_s(size, NOW) for size in (1, 50, 100, 400)] == [1.04, 3.0, 5.0, 5.0]
    assert (times.sized_s(NOW), times.sized_s_each(NOW)) == (4.0, 0.04)


def test_one_that_ran_out_of_time_would_have_taken_longer() -> None:
    times = known(*[2.0] * FEWEST, quantile=1.0)
    times.ran_out(Served(0.0, 1.9, 10), NOW)
    assert times.needed_s(10, NOW) == pytest.approx(1.5 * 1.9)


def test_one_that_had_little_time_says_nothing() -> None:
    times = known(*[2.0] * FEWEST, quantile=0.05)
    for _ in range(REMEMBERED):
        times.ran_out(Served(0.0, 0.1, 10), NOW)
    assert times.needed_s(10, NOW) == 2.0


def test_where_all_run_out_of_time_the_estimate_grows_until_some_do_not() -> None:
    times = ServingTimes(0.95)
    given_s = 0.1
    for _ in range(20 * REMEMBERED):
        times.ran_out(Served(0.0, given_s, 10), NOW)
        given_s = max(given_s, times.needed_s(10, NOW) or 0.0)
        if given_s >= 3.0:
            return
    raise AssertionError(f"requests are still begun with {given_s} s left")


def test_one_peer_says_nothing_of_another() -> None:
    times = ServingTimesByPeer(0.95)
    for _ in range(FEWEST):
        times.of("slow").finished(Served(0.0, 9.0, 10), NOW)
    assert times.of("slow").needed_s(10, NOW) == 9.0
    assert times.of("fast").needed_s(10, NOW) is None


def test_peers_that_come_and_go_are_not_kept() -> None:
    times = ServingTimesByPeer(0.95)
    kept = times.of("kept")
    for n in range(3 * PEERS):
        times.of(f"p{n}")
        assert times.of("kept") is kept
    assert len(times._peers) == PEERS


@pytest.mark.parametrize(
    ("left_s", "whole_s", "refused"),
    [(1.9, 10.0, True), (2.0, 10.0, False), (1.4, 3.0, True), (1.6, 3.0, False)],
)
def test_too_late_is_after_half_of_the_time_and_with_less_left_than_needed(
    left_s: float, whole_s: float, refused: bool
) -> None:
    fault = too_late(2.0, Budget(whole_s, left_s), "allocate")
    assert (fault is not None) is refused
    if fault is not None:
        assert fault.reason is Reason.STAGE_DEADLINE
        assert fault.metadata["stage"] == "allocate"
        assert f"{left_s:g} s are left, and 2 s are needed" in fault.message


def test_nobody_is_late_for_what_is_not_known() -> None:
    assert too_late(None, Budget(10.0, 0.1), "allocate") is None
