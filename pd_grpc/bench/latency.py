"""How the rate of preparing depends on how long D takes to answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_grpc.bench.door import Manners
from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_run import Tell, all_finished
from pd_grpc.bench.setup import Row, Setup, Timing
from pd_grpc.bench.statistics import estimate
from pd_grpc.bench.system import Group, System, running_system
from pd_grpc.bench.workload import spread_lengths

DELAYS_MS = (0, 10, 50, 100)
AT_ONCE = 64
_OUTPUT_TOKENS = 2
"""As few as let D need the KV."""
_LIMIT_S = 120.0


async def _rate(system: System, delay_ms: int, scope: Scope) -> float:
    """Requests prepared, computed and handed over in a second."""
    await system.behave(0, Manners(delay_s=delay_ms / 1000))
    lengths = spread_lengths(scope.latency_requests, scope.seed_input, _OUTPUT_TOKENS)
    requests = system.requests(lengths)
    ended = await system.closed({"all": Group(requests, AT_ONCE)}, _LIMIT_S)
    ends = all_finished(ended, len(requests))
    return len(ends) / ends[-1]


async def latency_figures(scope: Scope, tell: Tell) -> Mapping[str, Any]:
    """`rate_100ms_over_0ms`, and the rates themselves by delay; step times are unscaled."""
    rates: dict[int, list[float]] = {delay: [] for delay in DELAYS_MS}
    async with running_system(Setup(Row.POOL, Timing(1.0, floor_ms=scope.floor_ms))) as system:
        for _ in range(scope.latency_repeats):
            for delay in DELAYS_MS:
                rates[delay].append(await _rate(system, delay, scope))
                tell(f"D answers after {delay} ms: {rates[delay][-1]:.1f} req/s")
    ratios = [a / b for a, b in zip(rates[100], rates[0], strict=True)]
    found = estimate(ratios)
    figures: dict[str, Any] = {
        "rate_100ms_over_0ms": found.median,
        "rate_100ms_over_0ms_interval": [found.low, found.high],
    }
    for delay, values in rates.items():
        figures[f"rate_{delay}ms_per_s"] = estimate(values).median
    return figures
