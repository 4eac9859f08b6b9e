"""Every server can be explored, and the router asked, with nothing but grpcurl."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_grpc.cli.cluster import ClusterPlan, LocalCluster

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or shutil.which("grpcurl")

pytestmark = pytest.mark.skipif(GRPCURL is None, reason="grpcurl is not installed")

SERVICES = {
    "router": {"InferenceService", "AdminService"},
    "prefill": {"PrefillService", "InferenceService", "AdminService"},
    "decode": {"DecodeService", "InferenceService", "AdminService"},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterPlan(engine="sim")) as running:
        yield running


def grpcurl(endpoint: str, *arguments: str, body: str | None = None) -> str:
    assert GRPCURL is not None
    data = ["-d", body] if body is not None else []
    result = subprocess.run(
        [GRPCURL, "-plaintext", *data, endpoint, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("role", list(SERVICES))
def test_the_services_of_each_server_are_listed_and_described(
    role: str, cluster: LocalCluster
) -> None:
    endpoint = next(i.endpoint for i in cluster.instances if i.role == role)
    listed = grpcurl(endpoint, "list").split()
    assert {f"pd_grpc.v1.{name}" for name in SERVICES[role]} <= set(listed)
    assert {"grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= set(listed)
    for name in SERVICES[role]:
        assert f"pd_grpc.v1.{name} is a service" in grpcurl(
            endpoint, "describe", f"pd_grpc.v1.{name}"
        )
    info = json.loads(grpcurl(endpoint, "pd_grpc.v1.AdminService/GetServerInfo"))
    assert info["server"]["health"] == "HEALTH_SERVING"


def test_text_is_generated_from_the_router(cluster: LocalCluster) -> None:
    body = '{"text": "Paris is", "sampling": {"max_tokens": 4, "temperature": 0}}'
    method = "pd_grpc.v1.InferenceService/Generate"
    answer = grpcurl(cluster.router_endpoint, method, body=body)
    messages = json.loads("[" + answer.replace("}\n{", "},{") + "]")
    token_ids = [token for message in messages for token in message.get("token_ids", [])]
    text = "".join(message.get("text", "") for message in messages)
    assert text == "".join(f" w{token}" for token in token_ids if token > 258)
    assert messages[-1]["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": len(token_ids),
    }
    assert messages[-1]["decode_instance"] == "decode-0"
