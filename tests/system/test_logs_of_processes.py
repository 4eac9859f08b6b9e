"""What servers as processes write: JSON alone, and one line of what a dead one took along."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from pd_grpc.cli.cluster import ClusterPlan, LocalCluster
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2_grpc
from tests.system.asking import request

MARK = 29711
TRACE = "ef" * 16
LIMIT_S = 20.0
STEADY = ("--sim-time-scale", "20", "--grace-s", "0.3")


@dataclass
class Asked:
    """A request in flight, and how it ended."""

    began: threading.Event = field(default_factory=threading.Event)
    code: str = ""


def _ask(endpoint: str, tokens: int, asked: Asked) -> None:
    message = request([MARK] * tokens, Sampling(max_tokens=2000, temperature=0.0, ignore_eos=True))
    traceparent = ("traceparent", f"00-{TRACE}-{'cd' * 8}-00")
    with grpc.insecure_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            for part in stub.Generate(message, timeout=60, metadata=(traceparent,)):
                if part.token_ids:
                    asked.began.set()
        except grpc.RpcError as error:
            asked.code = error.code().name


@pytest.fixture
def json_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers started from here on write JSON, and all that they have to say."""
    monkeypatch.setenv("PD_LOG_FORMAT", "json")
    monkeypatch.setenv("PD_LOG_LEVEL", "debug")


def _written(cluster: LocalCluster) -> Iterator[dict[str, Any]]:
    """Every line of every server but what it says on standard output."""
    for instance in cluster.instances:
        for line in instance.log.read_text(encoding="utf-8").splitlines():
            if not line.startswith("ready "):
                yield json.loads(line)


def _of_trace(cluster: LocalCluster) -> list[dict[str, Any]]:
    lines = [line for line in _written(cluster) if line.get("trace_id") == TRACE]
    return [line for line in lines if line["level"] != "debug"]


def _wait(condition: Any, what: str) -> None:
    ends = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends, what
        threading.Event().wait(0.02)


@pytest.mark.parametrize(
    ("victim", "tokens", "reason"),
    [("prefill-0", 6000, "PREFILL_LOST"), ("decode-0", 40, "DECODE_LOST")],
)
def test_the_router_notes_what_a_killed_server_took_along(
    victim: str, tokens: int, reason: str, json_logs: None
) -> None:
    plan = ClusterPlan(engine="sim", flags=(*STEADY, "--num-blocks", "1024"))
    with LocalCluster(plan) as cluster:
        asked = Asked()
        asking = threading.Thread(target=_ask, args=(cluster.router_endpoint, tokens, asked))
        asking.start()
        if victim == "decode-0":
            assert asked.began.wait(LIMIT_S)
        else:
            opened = ("session_opened", victim)
            _wait(
                lambda: opened in {(x.get("event"), x.get("peer")) for x in _written(cluster)},
                "P has not turned to D",
            )
        os.kill(cluster.processes[victim], signal.SIGKILL)
        asking.join(LIMIT_S)
        assert asked.code == "UNAVAILABLE"
        other = "decode-0" if victim == "prefill-0" else "prefill-0"
        _wait(
            lambda: any(
                x["event"] == "session_lost" and x["instance"] == other
                for x in _written(cluster)
                if "event" in x
            ),
            "nobody noticed",
        )
        (line,) = _of_trace(cluster)
        assert (line["instance"], line["reason"]) == ("router", reason)
        assert line["event"] == "request_failed" and victim in line["message"]
        same = [x for x in _written(cluster) if x.get("transfer_id") == line["transfer_id"]]
        assert [x for x in same if x["level"] != "debug"] == [line]
        everything = list(_written(cluster))
    assert all(line["instance"] and line["time"].endswith("Z") for line in everything)
    assert all(str(MARK) not in str(line["message"]) for line in everything)
