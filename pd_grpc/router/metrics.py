"""Requests in numbers, as their clients see them; tries elsewhere are `recovery_metrics`."""

from __future__ import annotations

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.router.in_flight import InFlight
from pd_grpc.router.timing import RequestTimes
from pd_grpc.telemetry import names
from pd_grpc.telemetry.instance_metrics import InstanceMetrics
from pd_grpc.telemetry.instruments import Instruments


class RouterMetrics(InstanceMetrics):
    """Hears of every request."""

    def __init__(self, instruments: Instruments, in_flight: InFlight) -> None:
        super().__init__(instruments, "router", Reason)
        self.watch_late_events(lambda: in_flight.late_events)
        self._decisions = instruments.counter(names.METRIC_DECISION)
        self._first = instruments.histogram(names.METRIC_TTFT)
        self._each = instruments.histogram(names.METRIC_TPOT)
        self._whole = instruments.histogram(names.METRIC_REQUEST_DURATION)
        self._gap = instruments.histogram(names.METRIC_SECOND_TOKEN_GAP)

    def decided(self, disaggregated: bool, why: str) -> None:
        """A request goes to a pair, or to a D alone."""
        how = "disaggregated" if disaggregated else "local"
        self._decisions.add(1, {names.ATTR_METRIC_DECISION: how, names.ATTR_METRIC_WHY: why})

    def routed(self, seconds: float, fault: Fault | None) -> None:
        """A request has come to P, or could not be brought there."""
        self.stage("route", seconds, fault)

    def ended(
        self, times: RequestTimes, operation: str, model: str, fault: Fault | None, now: float
    ) -> None:
        """A request has ended, by its whole answer, a fault or its client's leaving; `operation` is
        names.OPERATION_CHAT or OPERATION_COMPLETION. However many choices it has, it is one: its
        first token is the first of any, and its time for each token their mean."""
        about = {
            names.ATTR_GEN_AI_OPERATION: operation,
            names.ATTR_GEN_AI_PROVIDER: names.PROVIDER,
            names.ATTR_GEN_AI_MODEL: model,
        }
        error = {}
        if fault is not None:
            self.refused(fault)
            error[names.ATTR_ERROR_TYPE] = fault.reason.value
        self._whole.record(now - times.accepted, {**about, **error})
        if (first := times.first) is None or first.first_token_at is None:
            return
        self._first.record(first.first_token_at - times.accepted, about)
        if first.second_token_at is not None:
            self._gap.record(first.second_token_at - first.first_token_at)
        if (per_token_s := times.per_token_s) is not None:
            self._each.record(per_token_s, about)
