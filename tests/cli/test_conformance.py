"""`pd-grpc conformance` as people and programs call it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.conformance.mutants.decode.sessions import welcome_without_a_session_id
from tests.conformance.subjects import decode_server, prefill_server

COMMAND = (sys.executable, "-m", "pd_grpc.cli.main", "conformance")


async def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command, as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_a_subject_that_passes(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    async with decode_server() as d:
        code, output = await run("--decode", d.endpoint, "--only", "D101", "--json", str(found))
    assert code == 0, output
    assert "1 passed, 0 failed" in output
    (case,) = json.loads(found.read_text())["cases"]
    assert (case["id"], case["passed"], case["explanation"]) == ("D101", True, "")
    assert case["rule"] in " ".join(output.split())


async def test_a_prefill_that_passes() -> None:
    async with prefill_server() as p:
        code, output = await run("--prefill", p.endpoint, "--only", "P10")
    assert code == 0, output
    assert "9 passed, 0 failed" in output


async def test_a_failure_is_explained_by_the_messages_exchanged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    welcome_without_a_session_id(monkeypatch)
    found = tmp_path / "found.json"
    async with decode_server() as d:
        code, output = await run("--decode", d.endpoint, "--only", "d101", "--json", str(found))
    assert code == 1
    assert "expected a session_id; got Welcome {" in output
    assert "-> Session hello {" in output and "<- Session welcome {" in output
    (case,) = json.loads(found.read_text())["cases"]
    assert case["passed"] is False and "expected a session_id" in case["explanation"]


async def test_nobody_there() -> None:
    code, output = await run("--decode", "127.0.0.1:9", "--answer-s", "1")
    assert code == 1 and "127.0.0.1:9" in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--decode, --prefill"),
        (["--decode", "127.0.0.1:9", "--prefill", "127.0.0.1:9"], "exactly one"),
        (["--prefill", "nowhere"], "--prefill"),
        (["--decode", "nowhere"], "--decode"),
        (["--decode", "127.0.0.1:9", "--only", "D999"], "D999"),
    ],
)
async def test_a_call_that_makes_no_sense_names_the_option(
    arguments: list[str], named: str
) -> None:
    code, output = await run(*arguments)
    assert code == 2 and named in output
