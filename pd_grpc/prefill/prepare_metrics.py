"""The prepare pool in numbers."""

from __future__ import annotations

from collections.abc import Callable

from pd_grpc.prefill.actions import Changed
from pd_grpc.prefill.breaker import BreakerState
from pd_grpc.prefill.prepare import LaneView, PreparePool
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry import names
from pd_grpc.telemetry.instruments import Instruments, Read

_BEING_PREPARED = (PrefillState.QUEUED, PrefillState.ALLOCATING)


class PrepareMetrics:
    """Gauges that look at the pool when they are read, from whichever thread, and the time that
    each request took to be prepared, from the call to the grant."""

    def __init__(self, instruments: Instruments, pool: PreparePool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._called: dict[TransferKey, float] = {}
        for name, value in (
            (names.METRIC_PREPARE_IN_FLIGHT, lambda lane: lane.in_flight),
            (names.METRIC_PREPARE_WAITING, lambda lane: lane.waiting),
            (
                names.METRIC_PREPARE_BREAKER_OPEN,
                lambda lane: int(lane.breaker is BreakerState.OPEN),
            ),
        ):
            instruments.gauge(name, self._each_lane(value))
        instruments.gauge(names.METRIC_PREPARE_READY, lambda: [(pool.granted, {})])
        self._wait = instruments.histogram(names.METRIC_PREPARE_WAIT)

    def changed(self, change: Changed) -> None:
        """A request has entered another state."""
        if change.before is None:
            self._called[change.key] = self._clock.now()
        elif change.before in _BEING_PREPARED and change.after not in _BEING_PREPARED:
            waited_s = self._clock.now() - self._called.pop(change.key)
            outcome = "ok" if change.fault is None else change.fault.reason.value
            self._wait.record(waited_s, {names.ATTR_OUTCOME: outcome})

    def _each_lane(self, value: Callable[[LaneView], int]) -> Read:
        return lambda: [
            (value(lane), {names.ATTR_METRIC_DECODE: lane.endpoint})
            for lane in self._pool.lanes(self._clock.now())
        ]
