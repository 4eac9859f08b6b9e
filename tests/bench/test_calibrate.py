from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.bench.calibrate import MOST_RUNS, NoFit, fit, reckon
from pd_grpc.bench.scope import FLOOR_MS, Scope
from pd_grpc.bench.seed_model import SERIAL_S


def quiet(text: str) -> None:
    """Nobody listens."""


async def test_a_time_proportional_to_the_floor_is_fitted_with_the_second_try() -> None:
    tries = []

    async def serial_s(floor_ms: float) -> float:
        tries.append(floor_ms)
        return 3 * floor_ms

    found = await fit(serial_s, guess_ms=50)
    assert found.floor_ms == pytest.approx(SERIAL_S / 3)
    assert len(tries) == 2


async def test_a_part_that_does_not_depend_on_the_floor_is_found_out() -> None:
    async def serial_s(floor_ms: float) -> float:
        return 100 + 2 * floor_ms

    found = await fit(serial_s, guess_ms=10, tolerance=1e-6)
    assert found.floor_ms == pytest.approx(87.5)
    assert found.serial_s == pytest.approx(SERIAL_S)


async def test_a_good_guess_takes_one_run() -> None:
    async def serial_s(floor_ms: float) -> float:
        return SERIAL_S * 1.009

    assert (await fit(serial_s, guess_ms=90)).floor_ms == 90


async def test_what_cannot_be_fitted_ends_with_what_came_nearest() -> None:
    async def serial_s(floor_ms: float) -> float:
        return 10.0

    with pytest.raises(NoFit, match=rf"{MOST_RUNS} runs; .* took 10.0 s"):
        await fit(serial_s, guess_ms=50)


async def test_the_constant_in_use_is_what_the_reckoning_fits() -> None:
    found = await reckon(replace(Scope(), floor_ms=80.0), quiet)
    assert found.floor_ms == pytest.approx(FLOOR_MS, abs=0.05)
