"""pd-grpc up with real processes, on the sim engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import psutil
import pytest

from pd_grpc.cli.cluster import ClusterError, ClusterPlan, LocalCluster
from pd_grpc.cli.settings import load_settings
from pd_grpc.cli.up import plan_of
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.cli.running import COMMAND, pd_grpc

SIM = {"PD_ENGINE": "sim", "PD_PORT": "0"}

pytestmark = pytest.mark.longest


class Up:
    """A running `pd-grpc up` and its children."""

    def __init__(self, logs: Path, *flags: str, **environ: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "up", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(logs), **SIM, **environ},
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
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def endpoints(self) -> dict[str, str]:
        """host:port by name, as the table shows them."""
        return dict(re.findall(r"│ (\S+) +│ (\S+:\d+) +│", self.shown))

    def metrics(self) -> dict[str, str]:
        """host:port of its metrics by name, as the table shows them."""
        return dict(re.findall(r"│ (\S+) +│ \S+:\d+ +│ \d+ +│ (\S+:\d+) +│", self.shown))

    def child(self, name: str) -> psutil.Process:
        return next(c for c in self.children if name in c.cmdline())


def test_up_shows_what_it_started_and_stops_everything_on_a_signal(tmp_path: Path) -> None:
    up = Up(tmp_path, "--decode", "2")
    for name in ("router", "prefill-0", "decode-0", "decode-1"):
        assert re.search(rf"{name} +│ 127.0.0.1:\d+ +│ {up.child(name).pid} ", up.shown), up.shown
    assert f"Logs: {tmp_path}" in up.shown
    up.process.send_signal(signal.SIGTERM)
    returncode, errors = up.wait()
    assert returncode == 0, errors
    assert not psutil.wait_procs(up.children, timeout=60)[1]
    assert list(tmp_path.iterdir()) == [], "logs are left"


def test_up_says_which_server_died_and_stops_the_others(tmp_path: Path) -> None:
    up = Up(tmp_path)
    os.kill(up.child("decode-0").pid, signal.SIGKILL)
    returncode, errors = up.wait()
    assert returncode == 1
    assert re.search(r"decode-0 \(pid \d+\) has ended, killed by SIGKILL", errors)
    (kept,) = tmp_path.iterdir()
    assert f"the logs are kept in {kept}" in errors and (kept / "decode-0.log").exists()
    assert not psutil.wait_procs(up.children, timeout=60)[1]


def test_the_servers_do_not_outlive_an_up_that_was_killed(tmp_path: Path) -> None:
    up = Up(tmp_path, "--aggregated")
    up.process.kill()
    up.wait()
    assert not psutil.wait_procs(up.children, timeout=60)[1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_an_up_that_a_script_started_in_the_background(
    signum: signal.Signals, tmp_path: Path
) -> None:
    """A shell without job control starts what ends in `&` with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        up = Up(tmp_path, "--aggregated")
    finally:
        signal.signal(signal.SIGINT, before)
    up.process.send_signal(signum)
    returncode, errors = up.wait()
    assert returncode == 0, errors
    assert not psutil.wait_procs(up.children, timeout=60)[1]


def test_another_signal_ends_the_wait_for_what_is_served_and_leaves_nothing(tmp_path: Path) -> None:
    up = Up(tmp_path, PD_DRAIN_S="1000")
    router = up.child("router")
    router.suspend()
    up.process.send_signal(signal.SIGINT)
    until_in(router.pid, "ShdPnd", signal.SIGTERM)
    for _ in range(3):
        up.process.send_signal(signal.SIGINT)
    returncode, errors = up.wait()
    assert (returncode, errors.count("Traceback")) == (0, 0), errors
    assert not psutil.wait_procs(up.children, timeout=60)[1]
    assert list(tmp_path.iterdir()) == [], "logs are left"


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.4, 0.6])
def test_a_signal_in_the_first_second_stops_it_without_a_word(
    delay_s: float, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*COMMAND, "up"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **SIM, "TMPDIR": str(tmp_path)},
    )
    # Of its own: Python itself installs a handler for SIGINT alone.
    until_in(process.pid, "SigCgt", signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay_s)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == [], "logs are left"


AMID_A_CLASS = """
import os, signal, sys
from pd_grpc.cli import main, commands

class Signals:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)

def run(before):
    class Holder:
        attribute = Signals()

commands.run = run
main.app()
"""


@pytest.mark.parametrize(("command", "status"), [("up", 0), ("status", 130)])
def test_a_signal_while_a_class_is_made_stops_it_without_a_word(command: str, status: int) -> None:
    """Where Python 3.11 makes a RuntimeError of any exception."""
    done = subprocess.run(
        [sys.executable, "-c", AMID_A_CLASS, command], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def until_in(pid: int, signals: str, signum: signal.Signals) -> None:
    """Wait until a signal is among those that /proc shows of a process under a name."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        found = re.findall(rf"{signals}:\s*([0-9a-f]+)", status)
        if int(found[0], 16) & 1 << (signum - 1):
            return
    pytest.fail(f"{signum.name} is not in {signals}")


def test_each_server_answers_prometheus_at_the_port_that_up_shows(tmp_path: Path) -> None:
    up = Up(tmp_path, "--decode", "2", "--prometheus", "127.0.0.1:0")
    try:
        answers = {name: metrics_at(endpoint) for name, endpoint in up.metrics().items()}
    finally:
        up.process.send_signal(signal.SIGTERM)
        up.wait()
    assert set(answers) == {"router", "prefill-0", "decode-0", "decode-1"}
    for name, text in answers.items():
        assert f'service_instance_id="{name}"' in text


def test_from_a_port_on_the_router_comes_first_then_prefill_then_decode() -> None:
    plan = plan_of(2, 2, {"config": None}, {}, {}, {"PD_ENGINE": "sim"}, "[::1]:9464")
    assert plan.metrics_of("router") == "[::1]:9464"
    assert [plan.metrics_of("prefill", i) for i in range(2)] == ["[::1]:9465", "[::1]:9466"]
    assert [plan.metrics_of("decode", i) for i in range(2)] == ["[::1]:9467", "[::1]:9468"]


def test_a_variable_gives_each_server_a_port_of_its_own_too() -> None:
    environ = {"PD_ENGINE": "sim", "PD_PROMETHEUS": "127.0.0.1:9464"}
    plan = plan_of(None, 1, {"config": None}, {}, {"aggregated": True}, environ)
    assert plan.metrics_of("decode") == "127.0.0.1:9465"


def metrics_at(endpoint: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


# --- where its settings come from -----------------------------------------------------------------


def test_variables_and_a_file_are_honoured_and_a_flag_goes_first(tmp_path: Path) -> None:
    toml = tmp_path / "pd.toml"
    toml.write_text(
        "num_blocks = 333\nbulk_port = 0\nmax_batch = 7\nsettle_s = 0.25\nblock_size = 32\n",
        encoding="utf-8",
    )
    logs = tmp_path / "logs"
    logs.mkdir()
    flags = ("--aggregated", "--config", str(toml), "--block-size", "8")
    environ = {"PD_MAX_BATCH": "9", "PD_MAX_MODEL_LEN": "2000", "PD_DRAIN_S": "2"}
    up = Up(logs, *flags, **environ)
    try:
        settings = {name: settings_of(endpoint) for name, endpoint in up.endpoints().items()}
    finally:
        up.process.send_signal(signal.SIGTERM)
        up.wait()
    engine, router = settings["decode-0"], settings["router"]
    assert (engine["engine"], engine["num_blocks"], engine["block_size"]) == ("sim", "333", "8")
    assert (engine["max_batch"], engine["max_model_len"]) == ("9", "2000")
    assert engine["drain_s"] == router["drain_s"] == "2.0"
    assert router["settle_s"] == "0.25"


def test_every_engine_is_on_the_device_that_a_flag_names_and_the_router_on_none() -> None:
    environ = {"PD_ENGINE": "sim", "PD_DEVICE": "cuda:1"}
    plan = plan_of(1, 2, {"config": None}, {"device": "cuda:2"}, {}, environ)
    config = load_settings(DecodeConfig, plan.engine_flags(), environ)
    assert config.device == "cuda:2"
    assert "--device" not in plan.router_flags


def settings_of(endpoint: str) -> dict[str, str]:
    with grpc.insecure_channel(endpoint) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        answer = admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=60)
    return dict(answer.server.settings)


@pytest.mark.parametrize(
    ("flags", "environ", "says"),
    [
        (["--port", "70000"], {}, "port must be less than or equal to 65535, not '70000'"),
        (["--block-size", "0"], {}, "block_size must be greater than or equal to 1, not '0' (from"),
        ([], {"PD_NUM_BLOCKS": "many"}, "num_blocks must be a valid integer"),
        (["--otlp", "foo"], {}, "otlp must be host:port"),
        (
            ["--prometheus", "h:65534"],
            {},
            "prometheus needs 2 more ports behind h:65534, and 65535",
        ),
        ([], {"PD_PREFILL": "h:1"}, "PD_PREFILL is for one server; `pd-grpc up` tells the router"),
        ([], {"PD_DECODE": "h:1"}, "PD_DECODE is for one server; `pd-grpc up` tells the router"),
        ([], {"PD_NAME": "me"}, "PD_NAME is for one server; `pd-grpc up` names its servers itself"),
        (
            ["--decode", "2"],
            {"PD_BULK_PORT": "7000"},
            "PD_BULK_PORT is for one server; `pd-grpc up` has several decode servers take free",
        ),
        (["--aggregated", "--prefill", "2"], {}, "--prefill 2 and --aggregated exclude each other"),
        (["--prefill", "0"], {}, "--prefill 0 needs --aggregated"),
        (["--config", "none.toml"], {}, "cannot read none.toml, named by --config"),
        (["--chunk-tokens", "17"], {}, ": chunk_tokens: 17 is not a multiple of block_size (16)"),
        (["--num-blocks", "99999999999"], {}, ": num_blocks: 99999999999 blocks of "),
        (["--engine", "torch", "--device", "tpu"], {}, ": device: tpu is not a device that is"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(
    flags: list[str], environ: dict[str, str], says: str, tmp_path: Path
) -> None:
    result = pd_grpc("up", *flags, environ={"TMPDIR": str(tmp_path), **SIM, **environ})
    assert result.returncode == 2
    said = [line for line in result.stderr.splitlines() if not line.startswith("waiting for ")]
    assert len(said) == 1 and says in said[0], result.stderr
    assert list(tmp_path.iterdir()) == [], "logs are left"


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = pd_grpc("up", "--engine", "sim", environ={"PD_PORT": str(port)})
    assert result.returncode == 3
    assert result.stderr == f"cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_an_address_of_another_machine_is_said_at_once() -> None:
    result = pd_grpc("up", "--engine", "sim", "--host", "203.0.113.1")
    assert result.returncode == 3
    assert result.stderr == (
        "cannot listen on 203.0.113.1:50050: Cannot assign requested address\n"
    )


def test_a_cluster_that_fails_leaves_no_process_behind() -> None:
    plan = ClusterPlan(engine="sim", flags=("--num-blocks", "1"))
    failing = LocalCluster(plan)
    with pytest.raises(ClusterError, match="num_blocks"), failing:
        pytest.fail("it started")
    assert not any(psutil.pid_exists(pid) for pid in failing.processes.values())
