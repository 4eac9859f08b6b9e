from __future__ import annotations

import statistics

import pytest

from pd_grpc.bench.workload import mean_lengths, poisson_arrivals, spread_lengths


@pytest.mark.parametrize(("prompt", "output"), [(1280, 700), (512, 64), (1280, 2), (1, 1)])
def test_lengths_average_exactly_what_is_asked_for(prompt: int, output: int) -> None:
    assert mean_lengths(spread_lengths(1000, prompt, output)) == (prompt, output)


def test_lengths_are_spread_and_bounded() -> None:
    outputs = [length.output for length in spread_lengths(1000, 1280, 700)]
    assert 150 < statistics.stdev(outputs) < 270
    assert min(outputs) >= 0.25 * 700
    assert max(outputs) <= 2 * 700


def test_lengths_are_the_same_for_the_same_seed_alone() -> None:
    assert spread_lengths(50, 1280, 700, seed=3) == spread_lengths(50, 1280, 700, seed=3)
    assert spread_lengths(50, 1280, 700, seed=3) != spread_lengths(50, 1280, 700, seed=4)


def test_arrivals_come_at_their_rate_and_in_order() -> None:
    times = poisson_arrivals(rate_per_s=50, seconds=100)
    assert times == sorted(times)
    assert times[0] > 0 and times[-1] < 100
    assert len(times) == pytest.approx(5000, rel=0.05)
