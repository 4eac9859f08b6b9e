"""The prepare pool in numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pd_grpc.prefill.actions import Changed
from pd_grpc.prefill.breaker import BreakerState
from pd_grpc.prefill.prepare import LaneView, PreparePool
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry import names

_Observe = Callable[[CallbackOptions], Iterable[Observation]]

_BEING_PREPARED = (PrefillState.QUEUED, PrefillState.ALLOCATING)


class PrepareMetrics:
    """Gauges that look at the pool when they are read, from whichever thread, and the time that
    each request took to be prepared, from the call to the grant."""

    def __init__(self, meter: Meter, pool: PreparePool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._called: dict[TransferKey, float] = {}
        meter.create_observable_gauge(
            names.METRIC_PREPARE_IN_FLIGHT,
            [self._each_lane(lambda lane: lane.in_flight)],
            unit="{request}",
            description="Allocates in flight, by D",
        )
        meter.create_observable_gauge(
            names.METRIC_PREPARE_WAITING,
            [self._each_lane(lambda lane: lane.waiting)],
            unit="{request}",
            description="requests that wait for their turn to ask, by D",
        )
        meter.create_observable_gauge(
            names.METRIC_PREPARE_BREAKER_OPEN,
            [self._each_lane(lambda lane: int(lane.breaker is BreakerState.OPEN))],
            unit="1",
            description="1 while the breaker is open, by D",
        )
        meter.create_observable_gauge(
            names.METRIC_PREPARE_READY,
            [lambda _: [Observation(pool.granted)]],
            unit="{request}",
            description="grants not yet computed",
        )
        self._wait = meter.create_histogram(
            names.METRIC_PREPARE_WAIT,
            unit="s",
            description="from the call to the grant, or to the end of a request that got none",
        )

    def changed(self, change: Changed) -> None:
        """A request has entered another state."""
        if change.before is None:
            self._called[change.key] = self._clock.now()
        elif change.before in _BEING_PREPARED and change.after not in _BEING_PREPARED:
            waited_s = self._clock.now() - self._called.pop(change.key)
            outcome = "ok" if change.fault is None else change.fault.reason.value
            self._wait.record(waited_s, {names.ATTR_OUTCOME: outcome})

    def _each_lane(self, value: Callable[[LaneView], int]) -> _Observe:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            lanes = self._pool.lanes(self._clock.now())
            return [
                Observation(value(lane), {names.ATTR_METRIC_DECODE: lane.endpoint})
                for lane in lanes
            ]

        return observe
