"""The decode server as a process: what it prints, how it ends, what its exit status says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

START_S = 40.0
END_S = 20.0
SIM = ("--engine", "sim", "--num-blocks", "64", "--block-size", "4", "--chunk-tokens", "16")


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`servers/decode.py`, killed if the test forgets it."""
    running = subprocess.Popen(
        [sys.executable, "-m", "pd_grpc.servers.decode", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
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


def generate(channel: grpc.Channel, tokens: int) -> object:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(100, 110)),
        sampling=sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
    )
    return inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=END_S)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_drains_on_a_signal(signum: int) -> None:
    with process(*SIM, "--name", "d-1", "--sim-time-scale", "0.05") as running:
        word, role, name, endpoint = ready(running)
        assert (word, role, name) == ("ready", "decode", "d-1")
        with grpc.insecure_channel(endpoint) as channel:
            call = generate(channel, 100)
            first = next(call)  # type: ignore[call-overload]
            running.send_signal(signum)
            rest = [t for message in call for t in message.token_ids]  # type: ignore[attr-defined]
            assert len(first.token_ids) + len(rest) == 100, "what runs is finished"
        _, errors = running.communicate(timeout=END_S)
        assert running.returncode == 0, errors
        assert "Traceback" not in errors


def test_a_second_signal_ends_what_runs() -> None:
    with process(*SIM, "--sim-time-scale", "1") as running:
        endpoint = ready(running)[3]
        with grpc.insecure_channel(endpoint) as channel:
            call = generate(channel, 200)
            next(call)  # type: ignore[call-overload]
            running.send_signal(signal.SIGTERM)
            running.send_signal(signal.SIGINT)
            with pytest.raises(grpc.RpcError) as raised:
                for _ in call:  # type: ignore[attr-defined]
                    pass
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        _, errors = running.communicate(timeout=END_S)
        assert running.returncode == 0, errors


@pytest.mark.parametrize("flag", ["--port", "--bulk-port"])
def test_a_port_in_use_is_status_3_and_named(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with process(*SIM, flag, port) as running:
            output, errors = running.communicate(timeout=START_S)
    assert running.returncode == 3, errors
    assert output == ""
    assert f"127.0.0.1:{port}" in errors and "Traceback" not in errors


def config_file(folder: Path, text: str) -> str:
    path = folder / "pd.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--block-size", "0"], "block_size"),
        (["--block-size", "5", "--chunk-tokens", "16"], "chunk_tokens"),
        (["--sim-vocab", "1"], "sim_vocab"),
        (["--max-model-len", "100000", "--num-blocks", "4"], "num_blocks"),
        (["--sim-heads", "1", "--sim-head-dim", "8"], "sim_head_dim"),
        (["--engine", "torch", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_status_2_and_named(
    arguments: list[str], named: str
) -> None:
    with process("--engine", "sim", *arguments) as running:
        output, errors = running.communicate(timeout=START_S)
    assert running.returncode == 2, errors
    assert output == ""
    assert named in errors.replace("-", "_") or named in errors
    assert "Traceback" not in errors
