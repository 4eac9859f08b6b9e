"""The decode server as a process: what it prints, and how it ends."""

from __future__ import annotations

import signal
from functools import partial

import grpc
import pytest

from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.servers.processes import END_S, SIM, ready, server

process = partial(server, "decode")


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
