"""The prefill server as a process: what it prints, and how it ends."""

from __future__ import annotations

import signal
from functools import partial

import grpc
import pytest

from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.servers.processes import END_S, SIM, ready, server

process = partial(server, "prefill")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_ends_on_a_signal(signum: int) -> None:
    with process(*SIM, "--name", "p-1") as running:
        word, role, name, endpoint = ready(running)
        assert (word, role, name) == ("ready", "prefill", "p-1")
        with grpc.insecure_channel(endpoint) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            info = admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=60).server
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
            assert admin.Drain(admin_pb2.DrainRequest(), timeout=60).transfers == 0
        _, errors = running.communicate(timeout=END_S)
        assert running.returncode == 0, errors
