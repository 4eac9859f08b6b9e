"""`pd-grpc conformance` as people and programs call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_grpc.cli.commands import app
from tests.conformance.mutants.decode.sessions import welcome_without_a_session_id
from tests.conformance.subjects import serve_decode_in_thread


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    result = CliRunner().invoke(app, ["conformance", *arguments])
    return result.exit_code, result.output


def test_a_subject_that_passes(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    with serve_decode_in_thread() as endpoint:
        code, output = run("--decode", endpoint, "--only", "D101", "--json", str(found))
    assert code == 0, output
    assert "1 passed, 0 failed" in output
    (case,) = json.loads(found.read_text())["cases"]
    assert (case["id"], case["passed"], case["explanation"]) == ("D101", True, "")
    assert case["rule"] in " ".join(output.split())


def test_a_failure_is_explained_by_the_messages_exchanged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    welcome_without_a_session_id(monkeypatch)
    found = tmp_path / "found.json"
    with serve_decode_in_thread() as endpoint:
        code, output = run("--decode", endpoint, "--only", "d101", "--json", str(found))
    assert code == 1
    assert "expected a session_id; got Welcome {" in output
    assert "-> Session hello {" in output and "<- Session welcome {" in output
    (case,) = json.loads(found.read_text())["cases"]
    assert case["passed"] is False and "expected a session_id" in case["explanation"]


def test_nobody_there() -> None:
    code, output = run("--decode", "127.0.0.1:9", "--answer-s", "1")
    assert code == 1 and "127.0.0.1:9" in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--decode"),
        (["--decode", "nowhere"], "--decode"),
        (["--decode", "127.0.0.1:9", "--only", "D999"], "D999"),
    ],
)
def test_a_call_that_makes_no_sense_names_the_option(arguments: list[str], named: str) -> None:
    code, output = run(*arguments)
    assert code == 2 and named in output
