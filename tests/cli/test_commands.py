"""The pd-grpc command with real processes, on the sim engine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from pd_grpc.cli.cluster import ClusterError, ClusterPlan, LocalCluster
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc

COMMAND = [sys.executable, "-m", "pd_grpc.cli.main"]
PLAN = ClusterPlan(engine="sim", flags=("--num-blocks", "2048"))
LONG = ("--max-tokens", "20000", "--ignore-eos")


def pd_grpc(
    *arguments: str, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, with these variables beside the test's own."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **environ},
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(PLAN) as running:
        yield running


def status(endpoint: str) -> list[dict[str, Any]]:
    result = pd_grpc("status", "--endpoint", endpoint, "--json")
    assert result.returncode == 0, result.stderr
    instances: list[dict[str, Any]] = json.loads(result.stdout)["instances"]
    return instances


def until_nothing_is_in_flight(cluster: LocalCluster) -> None:
    """Waits on each instance's own changes, as an operator would."""
    for instance in cluster.instances:
        with grpc.insecure_channel(instance.endpoint) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            changes = admin.WatchTransfers(admin_pb2.WatchTransfersRequest(), timeout=10)
            changes.initial_metadata()
            while admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=5).transfers:
                next(changes)
            changes.cancel()


# --- generate -------------------------------------------------------------------------------------


def test_generate_streams_the_text_of_the_answer(cluster: LocalCluster) -> None:
    result = pd_grpc("generate", "hi", "--endpoint", cluster.router_endpoint, "--max-tokens", "3")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"( w\d+){1,3}\n", result.stdout)
    assert result.stderr == ""


def test_generate_json_prints_one_object_with_everything(cluster: LocalCluster) -> None:
    result = pd_grpc(
        "generate", "hi", "--endpoint", cluster.router_endpoint, "--max-tokens", "3", "--json"
    )
    answer = json.loads(result.stdout)
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] <= 3
    assert answer["text"].count(" w") <= 3
    assert answer["finish_reason"] in ("stop", "length")
    assert set(answer["timings"]) == {
        "route",
        "queue",
        "prepare",
        "allocate",
        "compute",
        "first_token",
        "exposed_send",
        "total",
    }
    assert answer["timings"]["compute"] > 0
    assert (answer["prefill_instance"], answer["decode_instance"]) == ("prefill-0", "decode-0")
    assert re.fullmatch("[0-9a-f]{32}", answer["trace_id"])


def test_generate_takes_plain_text_and_the_endpoint_from_the_environment(
    cluster: LocalCluster,
) -> None:
    result = pd_grpc(
        "generate",
        "hi",
        "--raw",
        "--json",
        "--max-tokens",
        "1",
        PD_ENDPOINT=cluster.router_endpoint,
    )
    assert json.loads(result.stdout)["usage"]["prompt_tokens"] == 2


def test_the_same_seed_gives_the_same_answer(cluster: LocalCluster) -> None:
    asked = ("generate", "hi", "--endpoint", cluster.router_endpoint, "--max-tokens", "8")
    sampled = (*asked, "--temperature", "1", "--seed", "5")
    assert pd_grpc(*sampled).stdout == pd_grpc(*sampled).stdout != pd_grpc(*asked).stdout


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (["--top-k", "-1"], 1, "INVALID_ARGUMENT BAD_REQUEST: sampling.top_k: must be"),
        (["--temperature", "nan"], 1, "INVALID_ARGUMENT BAD_REQUEST: sampling.temperature"),
        (["--max-tokens", "100000000"], 1, "INVALID_ARGUMENT TOO_LARGE: "),
        (["--deadline", "0.05"], 1, "DEADLINE_EXCEEDED STAGE_DEADLINE: "),
        (["--seed", "-1"], 2, "-1"),
        (["--max-tokens", "many"], 2, "--max-tokens"),
        (["--no-such-flag"], 2, "--no-such-flag"),
    ],
)
def test_generate_says_what_is_wrong(
    flags: list[str], status: int, says: str, cluster: LocalCluster
) -> None:
    result = pd_grpc("generate", "hi", "--endpoint", cluster.router_endpoint, *flags)
    assert result.returncode == status, result.stderr
    assert says in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_an_empty_prompt_is_refused(cluster: LocalCluster) -> None:
    for flag in ("--chat", "--raw"):
        result = pd_grpc("generate", "", flag, "--endpoint", cluster.router_endpoint)
        assert result.returncode == 1
        assert "INVALID_ARGUMENT BAD_REQUEST" in result.stderr


def test_generate_without_a_router_says_so_in_one_line() -> None:
    result = pd_grpc("generate", "hi", "--endpoint", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE: no answer from 127.0.0.1:1")
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_interrupt_ends_the_request_everywhere(cluster: LocalCluster) -> None:
    """F33: a client that leaves in mid-answer frees both sides."""
    asked = ["generate", "hi", "--endpoint", cluster.router_endpoint, *LONG]
    with subprocess.Popen([*COMMAND, *asked], stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stdout.read(2)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(10) == 130
    until_nothing_is_in_flight(cluster)
    for instance in status(cluster.router_endpoint):
        assert instance["transfers"] == 0
        if instance["role"] != "router":
            assert instance["blocks"] == {"free": 2048}


# --- status ---------------------------------------------------------------------------------------


def test_status_json_has_every_instance(cluster: LocalCluster) -> None:
    instances = {i["name"]: i for i in status(cluster.router_endpoint)}
    assert instances.keys() == {"router", "prefill-0", "decode-0"}
    for instance in cluster.instances:
        shown = instances[instance.name]
        assert (shown["role"], shown["endpoint"]) == (instance.role, instance.endpoint)
        assert (shown["health"], shown["transfers"]) == ("serving", 0)
        assert shown["epoch"] > 0
    assert sum(instances["decode-0"]["blocks"].values()) == 2048


def test_status_shows_a_table(cluster: LocalCluster) -> None:
    result = pd_grpc("status", "--endpoint", cluster.router_endpoint, COLUMNS="160")
    assert result.returncode == 0
    for word in ("router", "prefill-0", "decode-0", "serving", "2048 free"):
        assert word in result.stdout


def test_status_without_a_router_fails_in_one_line() -> None:
    result = pd_grpc("status", "--endpoint", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE")


# --- up -------------------------------------------------------------------------------------------


class Up:
    """A running `pd-grpc up` and its children."""

    def __init__(self, logs: Path, *flags: str) -> None:
        self.logs = logs
        self.process = subprocess.Popen(
            [*COMMAND, "up", "--engine", "sim", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(logs)},
        )
        assert self.process.stdout is not None
        shown = []
        for line in self.process.stdout:
            shown.append(line)
            if line.startswith("Ask "):
                break
        self.shown = "".join(shown)
        self.children = psutil.Process(self.process.pid).children()

    def wait(self) -> tuple[int, str]:
        """Exit status and what it said on standard error."""
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors

    def child(self, name: str) -> psutil.Process:
        return next(c for c in self.children if name in c.cmdline())


def test_up_shows_what_it_started_and_stops_everything_on_a_signal(tmp_path: Path) -> None:
    up = Up(tmp_path, "--decode", "2")
    for name in ("router", "prefill-0", "decode-0", "decode-1"):
        assert re.search(rf"{name} +│ 127.0.0.1:\d+ +│ {up.child(name).pid} ", up.shown), up.shown
    up.process.send_signal(signal.SIGTERM)
    returncode, errors = up.wait()
    assert returncode == 0, errors
    assert not psutil.wait_procs(up.children, timeout=5)[1]
    assert list(tmp_path.iterdir()) == [], "logs are left"


def test_up_says_which_server_died_and_stops_the_others(tmp_path: Path) -> None:
    up = Up(tmp_path)
    os.kill(up.child("decode-0").pid, signal.SIGKILL)
    returncode, errors = up.wait()
    assert returncode == 1
    assert re.search(r"decode-0 \(pid \d+\) has ended, killed by SIGKILL", errors)
    assert not psutil.wait_procs(up.children, timeout=5)[1]


def test_the_servers_do_not_outlive_an_up_that_was_killed(tmp_path: Path) -> None:
    up = Up(tmp_path, "--aggregated")
    up.process.kill()
    up.wait()
    assert not psutil.wait_procs(up.children, timeout=10)[1]


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = pd_grpc("up", "--engine", "sim", "--port", str(port))
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "waiting" not in result.stderr, "servers were started first"


def test_a_server_that_dies_at_start_is_said_with_the_end_of_its_log(tmp_path: Path) -> None:
    result = pd_grpc(
        "up", "--engine", "sim", "--block-size", "0", "--port", "0", TMPDIR=str(tmp_path)
    )
    assert result.returncode == 1
    assert "has ended, exit status 2" in result.stderr
    assert "block_size must be greater than or equal to 1, not '0' (from --block-size)" in (
        result.stderr
    )


def test_a_cluster_that_fails_leaves_no_process_behind() -> None:
    plan = ClusterPlan(engine="sim", flags=("--num-blocks", "1"))
    failing = LocalCluster(plan)
    with pytest.raises(ClusterError, match="num_blocks"), failing:
        pytest.fail("it started")
    assert not any(psutil.pid_exists(pid) for pid in failing.processes.values())
    failing.remove_logs()


# --- serve ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_serve_help_shows_every_setting(role: str) -> None:
    result = pd_grpc("serve", role, "--help")
    assert result.returncode == 0
    assert "--lease-s" in result.stdout and "PD_LEASE_S" in result.stdout


@pytest.mark.parametrize(
    ("role", "arguments", "says"),
    [
        ("prefill", ["--no-such", "1"], "unknown flag --no-such"),
        ("decode", ["--lease-s", "-1"], "lease_s must be greater than 0"),
        ("router", ["--config", "pd.toml"], "unknown key leese_s in pd.toml"),
    ],
)
def test_serve_refuses_what_it_does_not_know(
    role: str,
    arguments: list[str],
    says: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "pd.toml").write_text("leese_s = 5\n", encoding="utf-8")
    result = pd_grpc("serve", role, *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_serve_says_that_its_port_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = pd_grpc("serve", "router", "--engine", "sim", "--port", port)
    assert result.returncode == 3
    assert f"127.0.0.1:{port}" in result.stderr


def test_serve_prints_one_line_when_ready_and_stops_on_a_signal() -> None:
    command = [*COMMAND, "serve", "router", "--engine", "sim", "--name", "r1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.fullmatch(r"ready router r1 127\.0\.0\.1:\d+\n", line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stdout.read() == ""
