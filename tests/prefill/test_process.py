"""The prefill server as a process: what it prints, how it ends, what its exit status says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from pd_grpc.v1 import admin_pb2, admin_pb2_grpc

START_S = 40.0
END_S = 20.0
SIM = ("--engine", "sim", "--num-blocks", "64", "--block-size", "4", "--chunk-tokens", "16")


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`servers/prefill.py`, killed if the test forgets it."""
    running = subprocess.Popen(
        [sys.executable, "-m", "pd_grpc.servers.prefill", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate(timeout=END_S)


def ready(running: subprocess.Popen[str]) -> list[str]:
    """The words of the ready line."""
    assert running.stdout is not None
    return running.stdout.readline().split()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_ends_on_a_signal(signum: int) -> None:
    with process(*SIM, "--name", "p-1") as running:
        word, role, name, endpoint = ready(running)
        assert (word, role, name) == ("ready", "prefill", "p-1")
        with grpc.insecure_channel(endpoint) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            info = admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=5).server
            assert info.health == admin_pb2.HEALTH_SERVING
            assert info.settings["num_blocks"] == "64"
        running.send_signal(signum)
        _, errors = running.communicate(timeout=END_S)
        assert running.returncode == 0, errors
        assert "Traceback" not in errors


def test_a_drain_by_an_operator_ends_it() -> None:
    with process(*SIM) as running:
        endpoint = ready(running)[3]
        with grpc.insecure_channel(endpoint) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            assert admin.Drain(admin_pb2.DrainRequest(), timeout=5).transfers == 0
        _, errors = running.communicate(timeout=END_S)
        assert running.returncode == 0, errors


def test_a_port_in_use_is_status_3_and_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with process(*SIM, "--port", port) as running:
            output, errors = running.communicate(timeout=START_S)
    assert (running.returncode, output) == (3, ""), errors
    assert f"127.0.0.1:{port}" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prefill-batch", "0"), "prefill_batch"),
        (("--block-size", "5", "--chunk-tokens", "16"), "chunk_tokens"),
        (("--bulk-port", "5"), "--bulk-port"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_status_2_and_named(
    arguments: tuple[str, ...], named: str
) -> None:
    with process("--engine", "sim", *arguments) as running:
        output, errors = running.communicate(timeout=START_S)
    assert (running.returncode, output) == (2, ""), errors
    assert named in errors and "Traceback" not in errors
