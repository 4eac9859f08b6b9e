"""Tries elsewhere in numbers."""

from __future__ import annotations

from collections import Counter

from pd_grpc.protocol.faults import STATUS_TABLE, Reason, Retry
from pd_grpc.router.recovery import Kind, Recovery
from pd_grpc.telemetry import names
from pd_grpc.telemetry.instruments import Instruments, Read

_NONE_YET = {reason: 0 for reason, row in STATUS_TABLE.items() if row.retry is Retry.OTHER}
"""Of a counter that begins at 1 Prometheus sees no increase."""


class RecoveryMetrics:
    """Counters, by the reason of the failure before, that look at the router's own counts when they
    are read, from whichever thread."""

    def __init__(self, instruments: Instruments, recovery: Recovery) -> None:
        counts = recovery.counts
        for name, counter in (
            (names.METRIC_ROUTER_RETRIES, counts.tried[Kind.RETRY]),
            (names.METRIC_ROUTER_CONTINUATIONS, counts.tried[Kind.CONTINUATION]),
            (names.METRIC_ROUTER_RETRIES_REFUSED, counts.refused),
        ):
            instruments.watched_counter(name, _by_reason(counter))
        instruments.gauge(names.METRIC_ROUTER_RETRY_BUDGET, lambda: [(recovery.budget.tokens, {})])


def _by_reason(counter: Counter[Reason]) -> Read:
    # A copy is made in one step; the loop's thread may count meanwhile.
    return lambda: [
        (number, {names.ATTR_METRIC_REASON: reason.value})
        for reason, number in {**_NONE_YET, **dict(counter)}.items()
    ]
