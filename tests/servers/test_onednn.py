"""A server keeps a bounded number of the products that oneDNN compiles for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pd_grpc.servers.onednn import CAPACITIES, bound_primitives

SERVE = """
import json, os, sys
from pd_grpc.engine.model_error import ModelError
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig
from pd_grpc.servers import process
async def start(config, telemetry):
    assert "torch" not in sys.modules
    print(json.dumps(dict(os.environ)))
    raise ModelError("model", "that was all")
settings = {"prefill": PrefillConfig, "decode": DecodeConfig}[sys.argv[1]]
sys.exit(process.run(sys.argv[1], settings, [], start))
"""
OLDER_NAME = "DNNL_PRIMITIVE_CACHE_CAPACITY"


def capacities(role: str, told: dict[str, str]) -> dict[str, str]:
    """What a server that is told this has in its environment before it loads torch."""
    names = (*CAPACITIES, OLDER_NAME)
    environ = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, role],
        cwd=Path(__file__).parents[2],
        env={**environ, **told},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "that was all" in done.stderr, done.stderr
    found = json.loads(done.stdout)
    return {name: found[name] for name in names if name in found}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_bounds_what_is_kept_before_it_loads_torch(role: str) -> None:
    assert capacities(role, {}) == CAPACITIES


def test_a_server_that_was_told_how_much_to_keep_keeps_to_that() -> None:
    told = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024"}
    assert capacities("decode", told) == told


@pytest.mark.parametrize("name", [*CAPACITIES, OLDER_NAME])
def test_any_of_the_names_tells(name: str) -> None:
    environ = {name: "0"}
    assert not bound_primitives(environ) and environ == {name: "0"}
