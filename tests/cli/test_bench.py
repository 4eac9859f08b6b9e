"""`pd-grpc bench` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_grpc.bench.scope import FLOOR_MS
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
