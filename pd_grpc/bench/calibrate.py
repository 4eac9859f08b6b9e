"""Fitting the seed model's one free parameter to the serial row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_model import SERIAL_S
from pd_grpc.bench.seed_run import Tell, run_seed
from pd_grpc.bench.setup import Row

TOLERANCE = 0.01
MOST_RUNS = 6


class Fit(NamedTuple):
    """A host's time for a step, and what the serial row then takes."""

    floor_ms: float
    serial_s: float


class NoFit(RuntimeError):
    """The wanted time was not reached; the message says what came nearest."""


async def fit(
    serial_s: Callable[[float], Awaitable[float]], guess_ms: float, wanted_s: float = SERIAL_S
) -> Fit:
    """The floor at which `serial_s` gives `wanted_s` within TOLERANCE, by secants through the last
    two tries; the first step supposes that time is proportional to the floor. NoFit."""
    tries = [Fit(guess_ms, await serial_s(guess_ms))]
    while abs(tries[-1].serial_s - wanted_s) > TOLERANCE * wanted_s:
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


async def calibrate(scope: Scope, tell: Tell) -> Fit:
    """By runs of the serial row as the seed workload runs it."""

    async def serial_s(floor_ms: float) -> float:
        run = await run_seed(Row.ZMQ_SERIAL, replace(scope, floor_ms=floor_ms))
        tell(f"a floor of {floor_ms:.2f} ms: the serial row takes {run.seconds:.1f} s")
        return run.seconds

    return await fit(serial_s, scope.floor_ms)
