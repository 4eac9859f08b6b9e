"""Tries elsewhere in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pd_grpc.protocol.faults import Reason
from pd_grpc.router.recovery import Kind, Recovery
from pd_grpc.telemetry import names

_Observe = Callable[[CallbackOptions], Iterable[Observation]]


class RecoveryMetrics:
    """Counters, by the reason of the failure before, that look at the router's own counts when they
    are read, from whichever thread."""

    def __init__(self, meter: Meter, recovery: Recovery) -> None:
        counts = recovery.counts
        for name, counter, what in (
            (names.METRIC_ROUTER_RETRIES, counts.tried[Kind.RETRY], "without a token yet"),
            (names.METRIC_ROUTER_CONTINUATIONS, counts.tried[Kind.CONTINUATION], "in mid-answer"),
            (names.METRIC_ROUTER_RETRIES_REFUSED, counts.refused, "but for the retry budget"),
        ):
            meter.create_observable_counter(
                name,
                [_by_reason(counter)],
                unit="{attempt}",
                description=f"attempts elsewhere of requests {what}, by reason",
            )
        meter.create_observable_gauge(
            names.METRIC_ROUTER_RETRY_BUDGET,
            [lambda _: [Observation(recovery.budget.tokens)]],
            unit="{attempt}",
            description="attempts elsewhere that the retry budget has left",
        )


def _by_reason(counter: Counter[Reason]) -> _Observe:
    def observe(options: CallbackOptions) -> Iterable[Observation]:
        # A copy is made in one step; the loop's thread may count meanwhile.
        counted = dict(counter)
        return [
            Observation(number, {names.ATTR_METRIC_REASON: reason.value})
            for reason, number in counted.items()
        ]

    return observe
