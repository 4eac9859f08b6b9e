"""The soak and the unplug run as people call them: the form that fits a test run, and whole."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pd_grpc.bench.endurance import soak, unplug
from pd_grpc.bench.endurance.fleet import Fleet, FleetPlan
from pd_grpc.bench.endurance.harm import Harmer
from pd_grpc.bench.endurance.plan import HEARTBEAT_S, plan_slots
from pd_grpc.bench.trace import read_trace
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig, Sizes, Timeouts
from pd_grpc.v1 import inference_pb2_grpc
from tests.cli.running import pd_grpc

PAGE = Path(__file__).parents[3] / "docs" / "soak.md"


def keys_of(command: str) -> set[str]:
    """The keys that the page explains in the part about a command."""
    part = PAGE.read_text(encoding="utf-8").partition(f"## `pd-grpc {command}`\n")[2]
    table = part.partition("\n## ")[0].partition("| key | what |\n")[2]
    return {key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def report_of(path: Path, command: str, *options: str, timeout_s: float) -> dict[str, Any]:
    """What a command that comes to its end has written; it exits with 1 when that is bad, and says
    why."""
    done = pd_grpc(*command.split(), *options, "--json", str(path), timeout_s=timeout_s)
    assert path.exists() and path.stat().st_size, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    assert set(report) == keys_of(command)
    wrong = (soak if command == "soak" else unplug).faults_of(report)
    assert done.returncode == bool(wrong), done.stderr
    assert "; ".join(wrong) in done.stderr
    return report


@pytest.mark.longest
@pytest.mark.timeout(240)
def test_a_soak_of_500_requests_loses_leaks_and_spoils_nothing(tmp_path: Path) -> None:
    options = ("--requests", "500", "--seed", "5")
    report = report_of(tmp_path / "soak.json", "soak", *options, timeout_s=220)
    nothing = dict.fromkeys(("hung", "wrong_tokens", "leaked_blocks", "leaked_transfers"), 0)
    assert {name: report[name] for name in nothing} == nothing
    assert (report["requests"], report["recovery"]) == (500, True)
    if report["stall_max_s"] < HEARTBEAT_S / 2:
        # A machine that stands still for as long takes all of its instances for lost.
        assert report["failed_by_code"] == {}, report["told"]
        assert report["undetected"] == []
    assert set(report["faults_by_kind"]) == {"kill", "restart", "stop", "cut", "corrupt"}
    assert report["faults_injected"] >= 25
    assert report["recovered_by_retry"] + report["recovered_by_continuation"] > 0
    assert report["p99_detect_s"] < 4.0


@pytest.mark.longest
@pytest.mark.timeout(120)
async def test_a_short_unplug_run_breaks_no_stream() -> None:
    """A D is killed and then a P. How long a stream may be silent is for a longer run to say: here
    other tests keep the machine busy."""
    scope = unplug.UnplugScope(
        streams=8, seconds=2.5, every_s=1.0, seed=4, least_kills=2, sim_decode_scale=2.0
    )
    report = await unplug.unplug(scope, tell=lambda line: None)
    figures = ("broken_streams", "wrong_tokens", "leaked_blocks", "leaked_transfers")
    assert [report[name] for name in figures] == [0, 0, 0, 0], report["told"] + report["left_over"]
    assert report["killed_by_name"] == {"d1": 1, "p0": 1}
    assert report["streams"] >= scope.streams
    assert report["recovered_by_retry"] + report["recovered_by_continuation"] > 0


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_quick_unplug_breaks_no_stream(tmp_path: Path) -> None:
    report = report_of(tmp_path / "unplug.json", "bench unplug", "--quick", timeout_s=280)
    assert (report["broken_streams"], report["wrong_tokens"]) == (0, 0)
    assert report["streams"] >= 200 and report["killed"] >= 5


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(900)
def test_no_kill_changes_an_answer_of_the_model(tmp_path: Path, packaged_model: None) -> None:
    options = ("--engine", "torch", "--quick")
    report = report_of(tmp_path / "unplug.json", "bench unplug", *options, timeout_s=880)
    assert (report["broken_streams"], report["wrong_tokens"]) == (0, 0)
    assert report["killed"] >= 1


async def test_a_request_that_cannot_be_judged_ends_the_run() -> None:
    """Here the channel is closed, so that nothing can be asked."""
    async with rpc.aio_channel("127.0.0.1:1", Timeouts(), Sizes()) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
    fleet = Fleet(FleetPlan())
    run = soak.Soak(fleet, stub, EngineConfig(engine="sim"), tell=print)
    (slot,) = plan_slots(1, 1, read_trace(None, 10))
    before = asyncio.all_tasks()
    run.send(slot.requests[0], Harmer(fleet))
    await asyncio.wait(asyncio.all_tasks() - before)
    with pytest.raises(grpc.aio.UsageError):
        await run.finish()
    assert (run.sent, run.tally.figures()["requests"]) == (1, 0)


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = pd_grpc("soak", "--json", str(tmp_path / "absent" / "soak.json"))
    assert done.returncode == 2
    assert "No such file or directory" in done.stderr
