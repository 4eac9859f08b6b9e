"""Fitting the seed model's one free parameter to the serial row.

By the reckoning of `model`, which no machine's load can disturb; or by runs of that row, which show
whether the reckoning holds where they are measured.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from pd_grpc.bench.model import SERIAL, SeedModel
from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_model import SERIAL_S, seed_steps
from pd_grpc.bench.seed_run import Tell, run_seed
from pd_grpc.bench.setup import Row
from pd_grpc.bench.workload import spread_lengths

MEASURED = 0.01
RECKONED = 1e-4
"""How near is near enough, relative."""
MOST_RUNS = 6


class Fit(NamedTuple):
    """A host's time for a step, and what the serial row then takes."""

    floor_ms: float
    serial_s: float


class NoFit(RuntimeError):
    """The wanted time was not reached; the message says what came nearest."""


async def fit(
    serial_s: Callable[[float], Awaitable[float]],
    guess_ms: float,
    wanted_s: float = SERIAL_S,
    tolerance: float = MEASURED,
) -> Fit:
    """The floor at which `serial_s` gives `wanted_s`, nearly enough, by secants through the last
    two tries; the first step supposes that time is proportional to the floor. NoFit."""
    tries = [Fit(guess_ms, await serial_s(guess_ms))]
    while abs(tries[-1].serial_s - wanted_s) > tolerance * wanted_s:
        if len(tries) == MOST_RUNS:
            near = min(tries, key=lambda each: abs(each.serial_s - wanted_s))
            raise NoFit(f"{MOST_RUNS} runs; {near.floor_ms:.2f} ms took {near.serial_s:.1f} s")
        floor_ms = _next(tries, wanted_s)
        tries.append(Fit(floor_ms, await serial_s(floor_ms)))
    return tries[-1]


def _next(tries: list[Fit], wanted_s: float) -> float:
    last = tries[-1]
    before = tries[-2] if len(tries) > 1 else Fit(0.0, 0.0)
    rise = last.serial_s - before.serial_s
    if rise == 0:
        return last.floor_ms * wanted_s / last.serial_s
    slope = (last.floor_ms - before.floor_ms) / rise
    return max(0.0, last.floor_ms + (wanted_s - last.serial_s) * slope)


async def reckon(scope: Scope, tell: Tell) -> Fit:
    """By the model."""
    lengths = spread_lengths(scope.seed_requests, scope.seed_input, scope.seed_output)

    async def serial_s(floor_ms: float) -> float:
        ends = SeedModel(lengths, scope.seed_at_once, seed_steps(floor_ms), SERIAL).run()
        tell(f"a floor of {floor_ms:.2f} ms: the serial row would take {ends[-1] / 1000:.1f} s")
        return ends[-1] / 1000

    return await fit(serial_s, scope.floor_ms, tolerance=RECKONED)


async def measure(scope: Scope, tell: Tell) -> Fit:
    """By runs of the serial row as the seed workload runs it."""

    async def serial_s(floor_ms: float) -> float:
        run = await run_seed(Row.ZMQ_SERIAL, replace(scope, floor_ms=floor_ms))
        tell(f"a floor of {floor_ms:.2f} ms: the serial row takes {run.seconds:.1f} s")
        return run.seconds

    return await fit(serial_s, scope.floor_ms)
