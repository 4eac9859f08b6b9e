"""The seed workload: one P, one D, every row in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pd_grpc.bench.driver import Ended
from pd_grpc.bench.model import BOUND, POOL, SERIAL, THREADS5, SeedModel
from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_model import CHUNK_TOKENS, PREFILL_BATCH, THREADS5_S, seed_steps
from pd_grpc.bench.setup import SETTINGS, Row, Setup, Timing
from pd_grpc.bench.statistics import estimate
from pd_grpc.bench.system import Group, System, running_system
from pd_grpc.bench.workload import spread_lengths
from pd_grpc.bench.zmq_peers import POLL_S
from pd_grpc.prefill.prepare import PrepareLimits
from pd_grpc.protocol.config import PrefillConfig

LIMIT_S = 1200.0
"""Of one run, wall time."""

PREPARING = {
    Row.ZMQ_SERIAL: SERIAL,
    Row.ZMQ_THREADS5: THREADS5,
    Row.ZMQ_ASYNC: POOL,
    Row.POOL: POOL,
    Row.BOUND: BOUND,
}
"""How each row prepares, for the reckoning."""

_BATCH: Mapping[str, Any] = {"prefill_batch": PREFILL_BATCH, "chunk_tokens": CHUNK_TOKENS}
_TELLING = (
    "prefill_batch",
    "chunk_tokens",
    "prepare_window",
    "prepare_total",
    "max_batch",
    "block_size",
    "num_blocks",
)

Tell = Callable[[str], None]


class RequestsFailed(RuntimeError):
    """A run in which every request should have finished, and some did not."""


@dataclass(frozen=True)
class SeedRun:
    """One run of one row. `seconds` is unscaled; `ends_s` are the unscaled times at which requests
    ended, in order."""

    row: Row
    seconds: float
    ends_s: tuple[float, ...]
    prefill_cpu_s: float
    decode_cpu_s: float


async def run_seed(row: Row, scope: Scope) -> SeedRun:
    """One run, on processes of its own."""
    timing = Timing(scope.seed_scale, floor_ms=scope.floor_ms)
    setup = Setup(row, timing, prefill_settings=_BATCH)
    async with running_system(setup) as system:
        lengths = spread_lengths(scope.seed_requests, scope.seed_input, scope.seed_output)
        requests = system.requests(lengths)
        if row is Row.BOUND:
            wire = [asdict(request) for request in requests]
            await system.prefills[0].do("prefetch", LIMIT_S, requests=wire)
        before = await _cpu(system)
        ended = await system.closed({"all": Group(requests, scope.seed_at_once)}, LIMIT_S)
        after = await _cpu(system)
    ends = all_finished(ended, len(requests))
    unscaled = tuple(at / scope.seed_scale for at in ends)
    cpu = [b - a for a, b in zip(before, after, strict=True)]
    return SeedRun(row, unscaled[-1], unscaled, *cpu)


async def _cpu(system: System) -> list[float]:
    """Seconds of processor time that P and D have used."""
    workers = (system.prefills[0], system.decodes[0])
    return [(await worker.do("stats"))["cpu_s"] for worker in workers]


async def run_rows(
    scope: Scope, tell: Tell, keep: Callable[[list[SeedRun]], None]
) -> list[SeedRun]:
    """Every row in turn, then all again, beginning with the next row each time, so that none always
    follows the same one. `keep` is given what there is after each."""
    runs: list[SeedRun] = []
    order = [*Row]
    for repeat in range(scope.repeats):
        first = repeat % len(order)
        for row in order[first:] + order[:first]:
            run = await run_seed(row, scope)
            tell(f"seed workload {repeat + 1}/{scope.repeats} {row.value}: {run.seconds:.1f} s")
            runs.append(run)
            keep(runs)
    return runs


def all_finished(ended: list[Ended], expected: int) -> list[float]:
    """When each ended, in order. RequestsFailed unless all `expected` finished."""
    failed = [each.fault for each in ended if not each.finished]
    if failed or len(ended) != expected:
        raise RequestsFailed(
            f"{len(ended) - len(failed)} of {expected} requests finished"
            + (f"; the first fault: {failed[0]}" if failed else "")
        )
    return sorted(each.ended_s for each in ended)


def seed_figures(runs: list[SeedRun], scope: Scope) -> Mapping[str, Any]:
    """The figures by their names: medians, intervals under `..._interval`, every run's time under
    `seed_runs_s`."""
    times = {row: [run.seconds for run in runs if run.row is row] for row in Row}
    figures: dict[str, Any] = {}
    for row, seconds in times.items():
        found = estimate(seconds)
        figures[f"{row.value}_s"] = found.median
        figures[f"{row.value}_s_interval"] = [found.low, found.high]
    # Of the runs that followed one another, so that what slows the machine down counts for both.
    for other in (Row.BOUND, Row.ZMQ_ASYNC, Row.ZMQ_THREADS5, Row.ZMQ_SERIAL):
        ratios = [a / b for a, b in zip(times[Row.POOL], times[other], strict=True)]
        found = estimate(ratios)
        figures[f"pool_over_{other.value}"] = found.median
        figures[f"pool_over_{other.value}_interval"] = [found.low, found.high]
    figures |= _prediction(figures[f"{Row.ZMQ_THREADS5.value}_s"], scope)
    figures["reckoned_s"] = reckoned(scope)
    figures["seed_runs_s"] = seed_runs(runs)
    figures["seed_settings"] = _settings()
    figures["seed_cpu_s"] = {
        row.value: {
            "prefill": [run.prefill_cpu_s for run in runs if run.row is row],
            "decode": [run.decode_cpu_s for run in runs if run.row is row],
        }
        for row in Row
    }
    return figures


def seed_runs(runs: list[SeedRun]) -> dict[str, list[float]]:
    """The time of every run, unscaled, by row."""
    return {row.value: [run.seconds for run in runs if run.row is row] for row in Row}


def _settings() -> dict[str, Any]:
    """What P and D of every row are told and what decides how long it takes, and how often the
    rows over ZeroMQ look for replies: in time of the wall, which the scale leaves as it is."""
    config = PrefillConfig.model_validate({**SETTINGS, **_BATCH}).model_dump()
    told = {name: config[name] for name in _TELLING}
    ahead = PrepareLimits.of(PrefillConfig.model_validate(_BATCH)).ahead
    return {**told, "prepare_ahead": ahead, "zmq_poll_s": POLL_S}


def _prediction(threads5_s: float, scope: Scope) -> Mapping[str, Any]:
    """How far the row that nothing was fitted to is from the reference: as measured, where the
    seed workload was run in full, and as reckoned."""
    full = replace(scope, **{name: getattr(Scope(), name) for name in _SIZES})
    by_reckoning = reckoned(full)[Row.ZMQ_THREADS5.value]
    predicted = by_reckoning if full != scope else threads5_s
    return {
        "threads5_prediction_error": (predicted - THREADS5_S) / THREADS5_S,
        "threads5_prediction_by": "reckoning" if full != scope else "measurement",
        "threads5_reckoned_error": (by_reckoning - THREADS5_S) / THREADS5_S,
    }


_SIZES = ("seed_requests", "seed_at_once", "seed_input", "seed_output")


def reckoned(scope: Scope) -> dict[str, float]:
    """What the rows take by `model` alone; what a run takes more is the machine's."""
    lengths = spread_lengths(scope.seed_requests, scope.seed_input, scope.seed_output)
    steps = seed_steps(scope.floor_ms)
    return {
        row.value: SeedModel(lengths, scope.seed_at_once, steps, how).run()[-1] / 1000
        for row, how in PREPARING.items()
    }
