"""More than 2P2D can carry: whether what it does finish in time stays what it was at best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_grpc.bench.real_load import TABLE
from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_run import RequestsFailed, Tell
from pd_grpc.bench.setup import Row, Setup, Timing
from pd_grpc.bench.statistics import steady_rate
from pd_grpc.bench.system import Group, System, running_system
from pd_grpc.bench.workload import Length, poisson_arrivals, spread_lengths

LOADS = (0.5, 0.75, 1.0, 1.5, 2.0)
"""Offered, in multiples of the capacity; the last is the overload."""
DEADLINE_S = 4.0
"""Of each request, wall time: some four times what one takes alone."""
_SCALE = 0.5
_INPUT_TOKENS, _OUTPUT_TOKENS = 512, 64
_BATCH = 16
# Room for some twenty requests on a D, so that P waits for blocks.
_BLOCKS = 200
_AT_ONCE = 64


async def overload_figures(scope: Scope, tell: Tell) -> Mapping[str, Any]:
    """`overload_goodput_ratio`: requests finished in time per second at twice the capacity, over
    the most at any load."""
    goodput = {}
    setup = Setup(
        Row.POOL,
        Timing(_SCALE, splitwise=TABLE),
        prefills=2,
        decodes=2,
        router=True,
        settings={"max_batch": _BATCH, "block_size": 64, "num_blocks": _BLOCKS},
    )
    async with running_system(setup) as system:
        capacity = await _capacity(system, scope.overload_window_s)
        tell(f"overload: 2P2D carry {capacity:.1f} req/s")
        for load in LOADS:
            await system.settle()
            goodput[load] = await _goodput(system, capacity * load, scope.overload_window_s)
            tell(f"overload: {goodput[load]:.1f} req/s in time at {load:g} times the capacity")
    peak = max(goodput.values())
    return {
        "overload_capacity_per_s": capacity,
        "overload_goodput_per_s": {str(load): rate for load, rate in goodput.items()},
        "overload_goodput_ratio": goodput[LOADS[-1]] / peak if peak else 0.0,
        "overload_deadline_s": DEADLINE_S,
    }


def _lengths(count: int, seed: int) -> list[Length]:
    return spread_lengths(max(1, count), _INPUT_TOKENS, _OUTPUT_TOKENS, seed)


async def _capacity(system: System, window_s: float) -> float:
    """Requests per second with as many under way as it can use."""
    requests = system.requests(_lengths(int(100 * window_s), 1))
    ended = await system.closed({"all": Group(requests, _AT_ONCE)}, window_s)
    faults = [each.fault for each in ended if not each.finished]
    if faults or not ended:
        raise RequestsFailed(f"{len(faults)} of {len(ended)} failed: {faults[:1]}")
    return steady_rate([each.ended_s for each in ended], window_s)


async def _goodput(system: System, rate_per_s: float, window_s: float) -> float:
    """Requests that finished in time and within the window, per second."""
    times = poisson_arrivals(rate_per_s, window_s, seed=2)
    requests = system.requests(_lengths(len(times), 2))
    ended = await system.open(list(zip(times, requests, strict=False)), DEADLINE_S)
    return steady_rate([each.ended_s for each in ended if each.finished], window_s)
