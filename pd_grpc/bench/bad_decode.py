"""One bad D among four: what the requests for the three good ones suffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_grpc.bench.door import Manners
from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_run import RequestsFailed, Tell
from pd_grpc.bench.setup import Row, Setup, Timing
from pd_grpc.bench.statistics import estimate, steady_rate
from pd_grpc.bench.system import Group, System, running_system
from pd_grpc.bench.workload import Length, spread_lengths

BAD: Mapping[str, Manners] = {
    "full_d": Manners(full=True),
    "silent_d": Manners(silent=True),
    "slow_d": Manners(delay_s=2.0),
}
ROWS = {"pool": Row.POOL, "threads5": Row.ZMQ_THREADS5}
GOOD = 3
AT_ONCE = 6
"""Requests under way for each good D."""
BAD_AT_ONCE = 64
"""And for the bad one: more than a window, so that some wait behind it."""
_SCALE = 1.0
_OUTPUT_TOKENS = 10
_BAD_INPUT_TOKENS = 16
_PER_SECOND = 40
"""More requests a second than a D gets through, so that none runs out."""


async def rates_of(row: Row, scope: Scope, tell: Tell) -> dict[str, float]:
    """Requests for the good Ds that finish in a second: with nothing sent to the bad one (`alone`),
    and with it bad in each way."""
    timing = Timing(_SCALE, floor_ms=scope.floor_ms)
    settings = {"num_blocks": 2000}
    rates = {}
    async with running_system(Setup(row, timing, decodes=GOOD + 1, settings=settings)) as system:
        for name, bad in {"alone": None, **BAD}.items():
            if bad is not None:
                await system.behave(GOOD, bad)
            rates[name] = await _throughput(system, scope, bad is not None)
            tell(f"one bad D, {row.value}, {name}: {rates[name]:.1f} req/s")
            await system.behave(GOOD, Manners())
            await system.settle()
    return rates


async def _throughput(system: System, scope: Scope, with_bad: bool) -> float:
    count = int(_PER_SECOND * scope.bad_window_s)
    lengths = spread_lengths(count, scope.seed_input, _OUTPUT_TOKENS)
    groups = {f"good-{i}": Group(system.requests(lengths, i), AT_ONCE) for i in range(GOOD)}
    if with_bad:
        # First, so that they are in the way from the start; and short, for what P computes for
        # those that a slow D lets through is no waiting.
        short = [Length(_BAD_INPUT_TOKENS, 2)] * (2 * count)
        groups = {"bad": Group(system.requests(short, GOOD), BAD_AT_ONCE), **groups}
    ended = await system.closed(groups, scope.bad_window_s)
    good = [each for each in ended if each.group != "bad"]
    faults = [each.fault for each in good if not each.finished]
    if faults:
        raise RequestsFailed(f"{len(faults)} requests for good Ds failed: {faults[0]}")
    return steady_rate([each.ended_s for each in good], scope.bad_window_s)


async def bad_decode_figures(scope: Scope, tell: Tell) -> Mapping[str, Any]:
    """`full_d_ratio_pool` and the like: throughput over that without the bad D."""
    rates: dict[str, list[float]] = {}
    for _ in range(scope.bad_repeats):
        for label, row in ROWS.items():
            for name, rate in (await rates_of(row, scope, tell)).items():
                rates.setdefault(f"{name}_{label}", []).append(rate)
    figures: dict[str, Any] = {
        "bad_d_rates_per_s": rates,
        "bad_d_load": {
            "scale": _SCALE,
            "good_ds": GOOD,
            "at_once_for_each_good_d": AT_ONCE,
            "at_once_for_the_bad_d": BAD_AT_ONCE,
            "output_tokens": _OUTPUT_TOKENS,
        },
    }
    for label in ROWS:
        for name in BAD:
            alone = rates[f"alone_{label}"]
            ratios = [a / b for a, b in zip(rates[f"{name}_{label}"], alone, strict=True)]
            found = estimate(ratios)
            figures[f"{name}_ratio_{label}"] = found.median
            figures[f"{name}_ratio_{label}_interval"] = [found.low, found.high]
    return figures
