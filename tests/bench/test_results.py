"""Where the figures of a run are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from pd_grpc.bench.results import NoPlace, Results
from pd_grpc.bench.seed_run import SeedRun
from pd_grpc.bench.setup import Row

RUNS = [SeedRun(row, 2.0, (1.0, 2.0), 0.0, 0.0) for row in Row]


def test_figures_are_beside_the_file_until_the_run_is_complete(tmp_path: Path) -> None:
    wanted, plot = tmp_path / "f.json", tmp_path / "rows.png"
    results = Results(wanted, plot, "a title")
    assert list(tmp_path.iterdir()) == []
    results.keep({"complete": False, "pool_s": 1.0}, [])
    assert not wanted.exists() and not plot.exists()
    results.keep({"complete": True, "pool_s": 2.0}, RUNS)
    assert plot.read_bytes().startswith(b"\x89PNG")
    results.complete()
    assert json.loads(wanted.read_text()) == {"complete": True, "pool_s": 2.0}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["f.json", "rows.png"]


def test_nothing_is_written_where_nothing_was_asked_for(tmp_path: Path) -> None:
    results = Results(None, None, "a title")
    results.keep({"complete": True}, RUNS)
    results.complete()
    assert results.figures == {"complete": True}


@pytest.mark.parametrize(
    ("json_file", "plot", "says"),
    [
        ("absent/f.json", None, "No such file or directory"),
        (".", None, "Is a directory"),
        (None, "absent/rows.png", "No such file or directory"),
        (None, "rows.jsonl", "must end with one of"),
        (None, "rows", "must end with one of"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, json_file: str | None, plot: str | None, says: str
) -> None:
    with pytest.raises(NoPlace, match=says):
        Results(
            None if json_file is None else tmp_path / json_file,
            None if plot is None else tmp_path / plot,
            "a title",
        )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    results = Results(folder / "f.json", folder / "rows.png", "a title")
    folder.rmdir()
    results.keep({"complete": True, "pool_s": 2.0}, RUNS)
    assert results.figures["pool_s"] == 2.0
    with pytest.raises(OSError, match="No such file"):
        results.complete()
