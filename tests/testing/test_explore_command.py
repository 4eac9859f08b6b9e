"""`pd-grpc explore` as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from pd_grpc.cli.commands import app
from pd_grpc.testing.explore import replay, walk
from pd_grpc.testing.explorer.scenario import ALL, FULL
from tests.testing.planted import ALL as FAULTS
from tests.testing.planted import planted

SHORT = ("explore", "--states", "4000", "--walks", "4", "--seed", "5")


def test_the_command_tells_what_it_saw_and_writes_it_down(tmp_path: Path) -> None:
    file = tmp_path / "explored.json"

    result = CliRunner().invoke(app, [*SHORT, "--json", str(file)])

    assert result.exit_code == 0, result.output
    assert "4000 states in" in result.output and "0 violations" in result.output
    report = json.loads(file.read_text())
    assert (report["states"], report["walks"], report["seed"]) == (4000, 4, 5)
    assert report["violations"] == []
    assert len(report["searches"]) == len(ALL)
    assert all(layer["depth"] > 0 for s in report["searches"] for layer in s["layers"][:1])


def test_a_violation_is_replayed_from_what_the_command_writes(tmp_path: Path) -> None:
    """As the page says: a walk by its seed, what the search found by its moves."""
    file = tmp_path / "explored.json"
    (fault,) = (each for each in FAULTS if each.name == "P takes blocks before it has a grant")

    with planted(fault):
        CliRunner().invoke(app, [*SHORT, "--faults", "1", "--json", str(file)])
        violations = json.loads(file.read_text())["violations"]
        searched = next(v for v in violations if v["seed"] is None)
        by_walk = next(v for v in violations if v["seed"] is not None)
        walked = walk(replace(FULL[by_walk["scenario"]], fine=True), by_walk["seed"])
        _, _, wrong = replay(FULL[searched["scenario"]], searched["moves"])

    assert list(walked.moves) == by_walk["moves"]
    assert by_walk["text"] in [found.text for found in walked.found]
    assert searched["text"] in [found.text for found in wrong]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_explored(
    tmp_path: Path,
) -> None:
    result = CliRunner().invoke(app, ["explore", "--json", str(tmp_path / "absent" / "e.json")])

    assert result.exit_code == 2
    assert "No such file or directory" in result.output
    assert "states" not in result.output


def test_a_violation_is_printed_with_its_moves_and_fails_the_command() -> None:
    (fault,) = (each for each in FAULTS if each.name == "P takes blocks before it has a grant")

    with planted(fault):
        result = CliRunner().invoke(app, [*SHORT, "--walks", "0", "--faults", "1"])

    assert result.exit_code == 1
    assert "no hold and wait" in result.output
    assert "start c1" in result.output
