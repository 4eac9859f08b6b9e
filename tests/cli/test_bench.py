"""`pd-grpc bench` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_grpc.bench.scope import FLOOR_MS
from pd_grpc.cli.long_run import ReportSoFar
from tests.cli.running import pd_grpc


def test_calibrating_prints_the_constant_that_is_in_use() -> None:
    done = pd_grpc("bench", "calibrate")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"floor_ms {FLOOR_MS:.2f}: the serial row takes 275.0 s\n"


def test_a_trace_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = pd_grpc("bench", "prepare", "--quick", "--trace", str(tmp_path / "absent.csv"))
    assert done.returncode == 2
    assert "absent.csv: No such file or directory" in done.stderr
    assert "seed workload" not in done.stderr


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs() -> None:
    done = pd_grpc("bench", "prepare", "--quick", "--json", "/absent/figures.json")
    assert done.returncode == 2
    assert done.stderr == "--json /absent/figures.json.part: No such file or directory\n"


def test_rates_that_are_none_are_refused_before_anything_runs() -> None:
    done = pd_grpc("bench", "serve", "--quick", "--rates", "1.5,0")
    assert done.returncode == 2
    assert done.stderr == "--rates 1.5,0: must be numbers above 0, divided by commas\n"


@pytest.mark.parametrize("command", ["kv", "serve"])
def test_a_plot_that_cannot_be_drawn_is_refused_by_its_own_name(command: str) -> None:
    done = pd_grpc("bench", command, "--quick", "--plot", "/absent/figures.png")
    assert done.returncode == 2
    assert done.stderr == "--plot /absent/figures.png: No such file or directory\n"


def test_what_a_run_has_found_lies_beside_its_report_until_that_is_written(tmp_path: Path) -> None:
    so_far, part = ReportSoFar(tmp_path / "run.json"), tmp_path / "run.json.part"
    for figure in (1, 2):
        so_far.keep({"figure": figure})
    assert json.loads(part.read_text()) == {"figure": 2}
    so_far.discard()
    assert not part.exists()
    ReportSoFar(tmp_path / "absent" / "run.json").keep({"figure": 3})


def test_without_its_extra_it_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError('not here')")
    done = pd_grpc("bench", "prepare", "--quick", environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr == (
        "zmq is not installed; the benchmark needs `pip install pd-grpc[bench]`\n"
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_quick_run_writes_its_figures_and_its_plot(tmp_path: Path) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "rows.png"
    done = pd_grpc(
        "bench", "prepare", "--quick", "--json", str(figures), "--plot", str(plot), timeout_s=500
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(figures.read_text())["scope"]["quick"] is True
    assert plot.read_bytes().startswith(b"\x89PNG")
