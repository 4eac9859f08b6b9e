"""A server that cannot start says why, and its exit status says whether a flag is to blame."""

from __future__ import annotations

import socket

import pytest

from tests.servers.processes import SIM, START_S, server


@pytest.mark.parametrize(
    ("role", "flag"), [("decode", "--port"), ("decode", "--bulk-port"), ("prefill", "--port")]
)
def test_a_port_in_use_is_status_3_and_named(role: str, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with server(role, *SIM, flag, port) as running:
            output, errors = running.communicate(timeout=START_S)
    assert (running.returncode, output) == (3, ""), errors
    assert f"127.0.0.1:{port}" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("role", "arguments", "named"),
    [
        ("decode", ["--block-size", "0"], "block_size"),
        ("decode", ["--block-size", "5", "--chunk-tokens", "16"], "chunk_tokens"),
        ("decode", ["--sim-vocab", "1"], "sim_vocab"),
        ("decode", ["--max-model-len", "100000", "--num-blocks", "4"], "num_blocks"),
        ("decode", ["--sim-heads", "1", "--sim-head-dim", "8"], "sim_head_dim"),
        ("decode", ["--engine", "torch", "--model", "/nowhere"], "/nowhere"),
        ("decode", ["--pool-gib", "1", "--num-blocks", "4"], "pool_gib"),
        ("prefill", ["--prefill-batch", "0"], "prefill_batch"),
        ("prefill", ["--block-size", "5", "--chunk-tokens", "16"], "chunk_tokens"),
        ("prefill", ["--bulk-port", "5"], "--bulk-port"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_status_2_and_named(
    role: str, arguments: list[str], named: str
) -> None:
    with server(role, "--engine", "sim", *arguments) as running:
        output, errors = running.communicate(timeout=START_S)
    assert (running.returncode, output) == (2, ""), errors
    assert named in errors.replace("-", "_") or named in errors
    assert "Traceback" not in errors
