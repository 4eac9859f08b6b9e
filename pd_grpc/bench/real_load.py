"""Ten minutes of a recorded chat service, replayed faster than it came, on 2P2D with a router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_run import Tell
from pd_grpc.bench.setup import Row, Setup, Timing
from pd_grpc.bench.statistics import percentile
from pd_grpc.bench.system import running_system
from pd_grpc.bench.trace import SOURCE, read_trace

TABLE = "llama2-70b/h100-80gb/8"
_DEADLINE_S = 120.0


async def real_load_figures(scope: Scope, tell: Tell) -> Mapping[str, Any]:
    """How many finished, and how long they took in the recorded service's own time."""
    arrivals = read_trace(scope.trace, scope.trace_minutes)
    speed = scope.trace_speed
    timing = Timing(1 / speed, splitwise=TABLE)
    setup = Setup(Row.POOL, timing, prefills=2, decodes=2, router=True)
    async with running_system(setup) as system:
        requests = system.requests([arrival.length for arrival in arrivals])
        times = [arrival.at_s / speed for arrival in arrivals]
        ended = await system.open(list(zip(times, requests, strict=True)), _DEADLINE_S)
    took = [(each.ended_s - each.sent_s) * speed for each in ended if each.finished]
    faults = sorted({each.fault for each in ended if not each.finished})
    tell(f"real load: {len(took)} of {len(ended)} finished")
    return {
        "real_load_requests": len(ended),
        "real_load_finished": len(took),
        "real_load_faults": faults[:5],
        "real_load_p50_s": percentile(took, 0.5) if took else None,
        "real_load_p99_s": percentile(took, 0.99) if took else None,
        "real_load_minutes": scope.trace_minutes,
        "real_load_speed": speed,
        "real_load_steps": TABLE,
        "real_load_source": SOURCE if scope.trace is None else str(scope.trace),
    }
