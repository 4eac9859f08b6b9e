"""Every row over real processes, with what each must keep to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.bench.bad_decode import rates_of
from pd_grpc.bench.driver import Ended
from pd_grpc.bench.plot import plot_rows
from pd_grpc.bench.prepare import bench_prepare
from pd_grpc.bench.results import Results
from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_model import CHUNK_TOKENS, PREFILL_BATCH
from pd_grpc.bench.seed_run import RequestsFailed, SeedRun, all_finished, run_seed, seed_figures
from pd_grpc.bench.setup import Row
from pd_grpc.bench.targets import TARGETS

pytest.importorskip("zmq")
pytest.importorskip("matplotlib")

TINY = replace(
    Scope.fast(),
    seed_scale=0.02,
    seed_requests=12,
    seed_at_once=6,
    seed_output=6,
    bad_window_s=2.0,
    latency_requests=8,
    trace_minutes=0.2,
    trace_speed=20.0,
    overload_window_s=1.0,
)

# What the system keeps to by itself: `running_system` ends with an error unless every block of P
# and D is free again, which it asks them over gRPC.


def quiet(text: str) -> None:
    """Nobody listens."""


async def test_every_request_of_every_row_finishes_and_every_block_comes_back() -> None:
    # Together, for most of it is the start of their processes.
    runs = await asyncio.gather(*(run_seed(row, TINY) for row in Row))
    for row, run in zip(Row, runs, strict=True):
        assert run.row is row
        assert len(run.ends_s) == TINY.seed_requests
        assert list(run.ends_s) == sorted(run.ends_s)
        # An answer takes at least its own steps, so that no row cheats.
        shortest = TINY.seed_output / 4
        assert run.seconds > shortest * TINY.floor_ms / 1000


@pytest.mark.soak
async def test_requests_for_good_ds_go_on_beside_a_bad_one_in_the_pool() -> None:
    rates = await rates_of(Row.POOL, TINY, quiet)
    assert rates.keys() == {"alone", "full_d", "silent_d", "slow_d"}
    assert all(rate > 0 for rate in rates.values()), rates


def runs_of(seconds: dict[Row, list[float]]) -> list[SeedRun]:
    return [
        SeedRun(row, time, (time / 2, time), 0.0, 0.0)
        for row, times in seconds.items()
        for time in times
    ]


def test_figures_compare_runs_that_followed_one_another() -> None:
    times = {row: [100.0, 200.0, 300.0] for row in Row}
    times[Row.POOL] = [101.0, 202.0, 303.0]
    times[Row.ZMQ_THREADS5] = [286.0, 286.0, 286.0]
    figures = seed_figures(runs_of(times), Scope())
    assert figures["pool_s"] == 202.0
    assert figures["pool_over_bound"] == pytest.approx(1.01)
    assert figures["pool_over_bound_interval"] == pytest.approx([1.01, 1.01])
    assert figures["threads5_prediction_error"] == pytest.approx(0.1)
    assert figures["threads5_prediction_by"] == "measurement"


def test_a_smaller_workload_predicts_by_reckoning_the_whole_one() -> None:
    figures = seed_figures(runs_of({row: [12.0] for row in Row}), TINY)
    assert figures["threads5_prediction_by"] == "reckoning"
    assert figures["threads5_prediction_error"] == figures["threads5_reckoned_error"]
    assert 0 < figures["threads5_prediction_error"] < 0.06


def test_a_run_in_which_a_request_failed_is_no_run() -> None:
    good, bad = Ended("all", 0.0, 1.0, 5, ""), Ended("all", 0.0, 2.0, 4, "4 tokens instead of 5")
    assert all_finished([good], 1) == [1.0]
    with pytest.raises(RequestsFailed, match=r"1 of 2 requests finished; .* 4 tokens instead of 5"):
        all_finished([good, bad], 2)
    with pytest.raises(RequestsFailed, match="1 of 2 requests finished"):
        all_finished([good], 2)


def test_the_figures_say_how_p_computed_and_how_often_replies_were_polled() -> None:
    figures = seed_figures(runs_of({row: [12.0] for row in Row}), TINY)
    told = figures["seed_settings"]
    assert (told["prefill_batch"], told["chunk_tokens"]) == (PREFILL_BATCH, CHUNK_TOKENS)
    assert (told["prepare_ahead"], told["zmq_poll_s"]) == (2 * PREFILL_BATCH, 0.001)


async def test_what_is_measured_before_a_run_is_ended_is_kept(tmp_path: Path) -> None:
    class Interrupted(RuntimeError):
        pass

    wanted = tmp_path / "figures.json"
    wanted.write_text("of an earlier run")
    results = Results(wanted, None, "a title")

    def keep(figures: Mapping[str, Any], runs: Sequence[SeedRun]) -> None:
        results.keep(figures, runs)
        raise Interrupted

    with pytest.raises(Interrupted):
        await bench_prepare(TINY, quiet, keep)
    part = json.loads((tmp_path / "figures.json.part").read_text())
    assert (part["complete"], part["targets_met"]) == (False, {})
    assert [len(times) for times in part["seed_runs_s"].values()] == [1, 0, 0, 0, 0]
    assert part["machine"]["memory_bytes"] > 0 and part["settings"]["max_batch"] == 256
    assert wanted.read_text() == "of an earlier run"


def test_the_plot_has_a_line_for_each_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.png"
    plot_rows(runs_of({row: [1.0, 2.0, 3.0] for row in Row}), "a title", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
@pytest.mark.timeout(240)
async def test_the_whole_benchmark_gives_every_figure() -> None:
    kept: list[Mapping[str, Any]] = []
    runs: list[SeedRun] = []

    def keep(figures: Mapping[str, Any], of: Sequence[SeedRun]) -> None:
        kept.append(figures)
        runs[:] = of

    await bench_prepare(TINY, quiet, keep)
    figures = kept[-1]
    assert [each["complete"] for each in kept] == [False] * (len(kept) - 1) + [True]
    wanted = {f"{row.value}_s" for row in Row} | {target.figure for target in TARGETS}
    wanted |= {f"{bad}_ratio_threads5" for bad in ("full_d", "silent_d", "slow_d")}
    wanted |= {"settings", "seed_settings", "bad_d_load", "scope"}
    wanted |= {"threads5_prediction_error", "real_load_p50_s", "machine", "versions", "compares"}
    assert wanted <= figures.keys()
    assert {run.row for run in runs} == set(Row)
    assert figures["targets_met"].keys() == {target.figure for target in TARGETS}
