"""What a server's process does when nobody can read what it says, and when its engine hangs."""

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
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.rpc import read_error
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
)
from tests.servers.processes import ready, server

FULL = "/dev/full"
"""Every write to it fails as on a full disk."""
END_S = 30.0

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""What could not be written is tried again when the process ends."""

full_disk = pytest.mark.skipif(not os.path.exists(FULL), reason="there is no /dev/full")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until_serving(channel: grpc.Channel, service: str) -> None:
    request = health_pb2.HealthCheckRequest(service=f"pd_grpc.v1.{service}")
    watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=END_S, wait_for_ready=True)
    for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            watch.cancel()
            return


@contextmanager
def _with_nowhere_to_write(role: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server whose every line is lost, and there are many."""
    with (
        open(FULL, "w") as full,
        subprocess.Popen(
            [sys.executable, "-m", f"pd_grpc.servers.{role}", "--log-level", "debug", *arguments],
            stdout=full,
            stderr=full,
            env=BUFFERED,
        ) as running,
    ):
        try:
            yield running
        finally:
            running.kill()


@full_disk
def test_servers_whose_output_is_on_a_full_disk_serve_and_end_as_ever() -> None:
    d, p, r = (_free_port() for _ in range(3))
    ask = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(100, 110)),
        sampling=sampling_pb2.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
    )
    meant = sim_answer(
        range(100, 110),
        Sampling(max_tokens=4, temperature=0, ignore_eos=True),
        EngineConfig(engine="sim"),
    )
    at_d, at_p = f"127.0.0.1:{d}", f"127.0.0.1:{p}"
    with (
        _with_nowhere_to_write("decode", "--engine", "sim", "--port", str(d)) as decode,
        _with_nowhere_to_write("prefill", "--engine", "sim", "--port", str(p)) as prefill,
        _with_nowhere_to_write(
            *("router", "--engine", "sim", "--port", str(r), "--prefill", at_p, "--decode", at_d)
        ) as router,
        grpc.insecure_channel(f"127.0.0.1:{r}") as channel,
    ):
        _until_serving(channel, "InferenceService")
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(3):
            messages = list(stub.Generate(ask, timeout=END_S))
            assert [token for each in messages for token in each.token_ids] == meant
            # What fails is logged by all three.
            leaving = stub.Generate(_endless(), timeout=END_S)
            next(leaving)
            leaving.cancel()
        for running in (router, prefill, decode):
            running.send_signal(signal.SIGTERM)
            assert running.wait(END_S) == 0, running.args


def _endless() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(50)),
        sampling=sampling_pb2.SamplingParams(max_tokens=2000, ignore_eos=True),
    )


def test_a_step_that_hangs_does_not_keep_a_process_from_ending() -> None:
    flags = ("--sim-time-scale", "1e6", "--drain-s", "0.2", "--call-s", "0.1")
    with server("decode", "--engine", "sim", *flags) as running:
        with grpc.insecure_channel(ready(running)[3]) as channel:
            request = inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=range(100, 110)),
                sampling=sampling_pb2.SamplingParams(max_tokens=4),
            )
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request, timeout=END_S)
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            while not admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=60).transfers:
                pass
            running.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError) as raised:
                next(call)
            fault = read_error(raised.value)
            assert isinstance(fault, Fault) and fault.reason is Reason.DRAINING
        assert running.wait(END_S) == 4
        assert running.stderr is not None and "waiting" in running.stderr.read()


@full_disk
def test_loading_goes_on_when_its_progress_cannot_be_written() -> None:
    program = "from pd_grpc.servers.process import progress; progress('loading weights')"
    with open(FULL, "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stderr=full, timeout=END_S, env=BUFFERED
        )
    assert done.returncode == 0
