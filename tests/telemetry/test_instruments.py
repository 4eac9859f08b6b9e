"""What is said of each metric in one place is what a collector is told."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pd_grpc.telemetry.exporting import make_telemetry
from pd_grpc.telemetry.instruments import CATALOG, SECONDS, Instrument, Instruments
from tests.telemetry.collector import Collector


def test_durations_are_told_apart_from_a_millisecond_to_the_longest_budget() -> None:
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 300)
    steps = [after / before for before, after in pairwise(SECONDS)]
    assert max(steps) <= 3, "a quantile would say little"
    durations = [about for about in CATALOG.values() if about.bounds and about.unit == "s"]
    assert durations
    assert {about.bounds for about in durations} == {SECONDS}


@pytest.mark.parametrize(
    "about", [each for each in CATALOG.values() if each.bounds], ids=lambda each: each.name
)
def test_a_collector_is_told_the_bounds_of_a_histogram(about: Instrument) -> None:
    with Collector() as collector:
        telemetry = make_telemetry("pd-grpc-router", "r0", collector.endpoint, "")
        Instruments("r0", telemetry.meters).histogram(about.name).record(0.02)
        telemetry.shutdown()
    (metric,) = collector.metrics.taken[-1].resource_metrics[0].scope_metrics[0].metrics
    (point,) = metric.histogram.data_points
    assert tuple(point.explicit_bounds) == about.bounds
    assert metric.unit == about.unit
