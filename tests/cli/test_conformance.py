"""`pd-grpc conformance` as people and programs call it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pd_grpc.cli.commands import app
from tests.conformance.mutants.decode.sessions import welcome_without_a_session_id
from tests.conformance.subjects import TRIES, decode_server, prefill_server, router_server
from tests.house.pages import ROOT
from tests.waiting import until

PATIENT = ("--tries", str(TRIES))
COMMAND = (sys.executable, "-m", "pd_grpc.cli.main", "conformance")


async def run(*arguments: str, cwd: Path | None = None) -> tuple[int, str]:
    """Exit code and output of the command, as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_a_subject_that_passes(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    async with decode_server() as d:
        code, output = await run(
            "--decode", d.endpoint, "--only", "D101", "--json", str(found), *PATIENT
        )
    assert code == 0, output
    assert "1 passed, 0 failed" in output
    (case,) = json.loads(found.read_text())["cases"]
    assert (case["id"], case["passed"], case["explanation"]) == ("D101", True, "")
    assert case["rule"] in " ".join(output.split())


async def test_a_prefill_that_passes() -> None:
    async with prefill_server() as p:
        code, output = await run("--prefill", p.endpoint, "--only", "P10", *PATIENT)
    assert code == 0, output
    assert "9 passed, 0 failed" in output


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_a_router_that_passes() -> None:
    prefill, decode, alternate = behind = [free_endpoint() for _ in range(3)]
    options = ("--as-prefill", prefill, "--as-decode", decode, "--as-alternate", alternate)
    async with router_server(*behind) as router:
        code, output = await run("--router", router.endpoint, *options, "--only", "R20", *PATIENT)
    assert code == 0, output
    assert "8 passed, 0 failed" in output


async def test_a_router_without_an_alternate_is_judged_by_the_other_cases() -> None:
    prefill, decode = behind = [free_endpoint() for _ in range(2)]
    options = ("--as-prefill", prefill, "--as-decode", decode, "--as-alternate", "")
    async with router_server(*behind) as router:
        code, output = await run("--router", router.endpoint, *options, "--only", "R20", *PATIENT)
    assert code == 0, output
    assert "5 passed, 0 failed, 3 do not apply" in output


async def test_a_router_that_does_not_call_the_kit_is_told_how_to_be_started() -> None:
    prefill, decode = free_endpoint(), free_endpoint()
    options = ("--as-prefill", prefill, "--as-decode", decode, "--as-alternate", "")
    async with router_server(free_endpoint(), free_endpoint()) as router:
        code, output = await run("--router", router.endpoint, *options, "--answer-s", "0.5")
    assert code == 1
    assert f"pd-grpc serve router --prefill {prefill} --decode {decode}" in " ".join(output.split())


async def test_a_place_for_the_kit_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        code, output = await run("--router", "127.0.0.1:9", "--as-prefill", endpoint)
    assert code == 1 and f"cannot listen on {endpoint}" in " ".join(output.split())


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


async def test_a_d_of_several_shards_cannot_be_judged() -> None:
    async with decode_server(tp=2) as d:
        code, output = await run("--decode", d.endpoint, "--only", "D101")
    assert code == 1 and "cannot be judged" in output
    assert "expected one shard" in output and "got 2" in output


async def test_nobody_there() -> None:
    code, output = await run("--decode", "127.0.0.1:9", "--answer-s", "1")
    assert code == 1 and "127.0.0.1:9" in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--decode, --prefill, --router"),
        (["--decode", "127.0.0.1:9", "--prefill", "127.0.0.1:9"], "exactly one"),
        (["--prefill", "nowhere"], "--prefill"),
        (["--decode", "nowhere"], "--decode"),
        (["--router", "127.0.0.1:9", "--as-decode", "nowhere"], "--as-decode"),
        (["--decode", "127.0.0.1:9", "--listen", "127.0.0.1"], "--listen goes with --prefill"),
        (["--prefill", "127.0.0.1:9", "--as-decode", "h:1"], "--as-decode goes with --router"),
        (["--decode", "127.0.0.1:9", "--as-alternate", ""], "--as-alternate goes with --router"),
        (["--decode", "127.0.0.1:9", "--json", "no/such/folder.json"], "--json no/such/folder"),
        (["--decode", "127.0.0.1:9", "--cases", "no_such_module"], "no_such_module"),
        (["--decode", "127.0.0.1:9", "--cases", "json"], "--cases json: CASES must be"),
        (["--decode", "127.0.0.1:9", "--only", "D999"], "D999"),
    ],
)
def test_a_call_that_makes_no_sense_names_the_option(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    called = CliRunner().invoke(app, ["conformance", *arguments])
    assert called.exit_code == 2 and named in " ".join(called.output.split())


async def test_a_case_of_ones_own_as_the_page_has_it(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "our_cases.py").write_text(example)
    options = ("--cases", "our_cases", "--only", "OURS-")
    async with decode_server() as d:
        code, output = await run("--decode", d.endpoint, *options, cwd=tmp_path)
    assert code == 0, output
    assert "1 passed, 0 failed" in output and "Our D takes prompts of 500 tokens." in output
    async with decode_server(max_model_len=400) as d:
        code, output = await run("--decode", d.endpoint, *options, cwd=tmp_path)
    assert code == 1
    assert "expected a model that takes more than 500 tokens; got 400" in output


async def test_two_cases_of_one_number_are_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "from pd_grpc.conformance.decode import DECODE_CASES as CASES\n"
    )
    code, output = await run("--decode", "127.0.0.1:9", "--cases", "twice", cwd=tmp_path)
    assert code == 2 and "two cases D101" in output


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
async def test_a_run_that_is_interrupted_leaves_what_it_has_judged(
    signum: signal.Signals, status: int, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"

    def written() -> dict[str, Any]:
        try:
            return json.loads(found.read_text())  # type: ignore[no-any-return]
        except (FileNotFoundError, json.JSONDecodeError):
            return {}  # not there yet, or being written

    async with decode_server() as d:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--decode", d.endpoint, "--json", str(found), stdout=asyncio.subprocess.PIPE
        )
        await until(lambda: len(written().get("cases", ())) >= 3, limit_s=40)
        assert written()["interrupted"] is True
        process.send_signal(signum)
        output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == status
    judged = written()
    assert judged["interrupted"] is True and judged["subject"]["name"] == "d"
    ids = [case["id"] for case in judged["cases"]]
    assert ids[:3] == ["D101", "D102", "D103"] and len(ids) < 300
    assert f"interrupted: {len(ids)} of " in output.decode()


async def test_the_verdict_stands_where_nobody_reads_it() -> None:
    read, write = os.pipe()
    os.close(read)
    async with decode_server() as d:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *("--decode", d.endpoint, "--only", "D101"),
            stdout=write,
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(write)
        _, errors = await asyncio.wait_for(process.communicate(), 40)
    assert (process.returncode, errors) == (0, b"")


async def test_the_verdict_stands_without_a_standard_output() -> None:
    async with decode_server() as d:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'exec "$@" >&-', "sh", *COMMAND),
            *("--decode", d.endpoint, "--only", "D101"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(process.communicate(), 40)
    assert (process.returncode, errors) == (0, b"")


async def test_a_file_that_takes_no_more_is_named() -> None:
    async with decode_server() as d:
        code, output = await run("--decode", d.endpoint, "--only", "D101", "--json", "/dev/full")
    assert code == 1
    assert output.strip() == "--json /dev/full: No space left on device"
