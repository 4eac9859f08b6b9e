from __future__ import annotations

import pytest

from pd_grpc.bench.statistics import estimate, percentile, steady_rate


def test_an_estimate_is_the_median_within_its_interval() -> None:
    found = estimate([5.0, 1.0, 3.0, 2.0, 4.0])
    assert found.median == 3.0
    assert 1.0 <= found.low <= 2.0
    assert 4.0 <= found.high <= 5.0


def test_an_estimate_of_equal_values_has_no_width() -> None:
    assert estimate([2.0] * 5) == (2.0, 2.0, 2.0)


def test_an_estimate_is_the_same_each_time() -> None:
    values = [1.0, 4.0, 9.0, 16.0, 25.0]
    assert estimate(values) == estimate(values)


def test_more_values_narrow_the_interval() -> None:
    few = estimate([float(i % 10) for i in range(10)])
    many = estimate([float(i % 10) for i in range(200)])
    assert many.high - many.low < few.high - few.low


def test_an_estimate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="values: there is none"):
        estimate([])


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (0.999, 100.0), (1.0, 100.0)]
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    share: float, expected: float
) -> None:
    assert percentile([float(i) for i in range(100, 0, -1)], share) == expected


def test_a_steady_rate_leaves_out_the_first_quarter_and_what_comes_late() -> None:
    times = [0.5, 1.0, 1.5, 2.5, 3.5, 4.0, 4.5]
    assert steady_rate(times, window_s=4.0) == pytest.approx(4 / 3)
