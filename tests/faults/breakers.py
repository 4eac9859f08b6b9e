"""When P turns to a D again after it has found it lost or silent."""

from __future__ import annotations

from pd_grpc.prefill.breaker import BreakerState
from pd_grpc.prefill.server import PrefillServer


def may_ask(p: PrefillServer) -> bool:
    """Whether P keeps from no D."""
    lanes = p.machine.placement.pool.lanes(p.runtime._clock.now())
    return all(lane.breaker is not BreakerState.OPEN for lane in lanes)
