"""What is counted in batches is exported as what is counted one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pd_grpc.telemetry import names
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.tallies import BATCH

STAGE = {names.ATTR_METRIC_STAGE: "queue", names.ATTR_OUTCOME: "ok"}
OTHER = {names.ATTR_METRIC_STAGE: "compute", names.ATTR_OUTCOME: "ok"}


class Measured:
    """A provider with the instruments of one instance, and what it exports."""

    def __init__(self, in_batches: bool = True) -> None:
        self._reader = InMemoryMetricReader()
        self.instruments = Instruments(
            "d0", MeterProvider([self._reader], shutdown_on_exit=False), in_batches
        )

    def exported(self) -> dict[str, Any]:
        """The points of each metric, in the order of their labels."""
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        (scope,) = data.resource_metrics[0].scope_metrics
        return {
            metric.name: sorted(
                (
                    {
                        key: value
                        for key, value in vars(point).items()
                        if "time" not in key and key != "exemplars"
                    }
                    for point in metric.data.data_points
                ),
                key=lambda point: sorted(point["attributes"].items()),
            )
            for metric in scope.metrics
        }


@pytest.mark.parametrize("values", [1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH + 7])
def test_every_value_is_exported_as_without_batches(values: int) -> None:
    one_by_one, batched = Measured(in_batches=False), Measured()
    for measured in (one_by_one, batched):
        stages = measured.instruments.histogram(names.METRIC_STAGE_DURATION)
        gaps = measured.instruments.histogram(names.METRIC_SECOND_TOKEN_GAP)
        bytes_ = measured.instruments.counter(names.METRIC_TRANSFER_BYTES)
        for number in range(values):
            stages.record(number / 100, STAGE)
            stages.record(number, OTHER)
            gaps.record(0.02)
            bytes_.add(number, {names.ATTR_METRIC_ROLE: "decode"})
    assert batched.exported() == one_by_one.exported()
    # The next export goes on from there.
    assert batched.exported() == one_by_one.exported()


def test_a_counter_is_there_with_0_as_soon_as_its_labels_are_known() -> None:
    measured = Measured()
    measured.instruments.counter(names.METRIC_REFUSALS).add(0, {"reason": "NO_BLOCKS"})
    (point,) = measured.exported()[names.METRIC_REFUSALS]
    assert (point["value"], dict(point["attributes"])) == (0, {"reason": "NO_BLOCKS"})


def test_before_anything_is_recorded_nothing_is_exported() -> None:
    measured = Measured()
    measured.instruments.histogram(names.METRIC_STAGE_DURATION)
    assert measured.exported() == {}


def test_no_value_is_lost_between_threads_and_exports() -> None:
    measured = Measured()
    stages = measured.instruments.histogram(names.METRIC_STAGE_DURATION)
    bytes_ = measured.instruments.counter(names.METRIC_TRANSFER_BYTES)

    def work(each: int) -> None:
        for _ in range(1000):
            stages.record(0.01, STAGE)
            bytes_.add(2, {names.ATTR_METRIC_ROLE: "decode"})
        measured.exported()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    exported = measured.exported()
    assert [point["count"] for point in exported[names.METRIC_STAGE_DURATION]] == [8000]
    assert [point["value"] for point in exported[names.METRIC_TRANSFER_BYTES]] == [16000]
