"""Servers that share cores do not keep each other from them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pd_grpc.cli import cluster
from pd_grpc.cli.cluster import ClusterPlan
from pd_grpc.servers.openmp import PREFILL_SPINS, SPIN_COUNT, SPINS, wait_as_fits

SERVE = """
import ctypes, sys
from pd_grpc.engine.model_error import ModelError
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig
from pd_grpc.servers import process
async def start(config, telemetry):
    ctypes.CDLL(sys.argv[1])
    raise ModelError("model", "that was all")
role = sys.argv[2]
settings = {"prefill": PrefillConfig, "decode": DecodeConfig}[role]
sys.exit(process.run(role, settings, sys.argv[3:], start))
"""


def libgomp() -> list[Path]:
    """The one that comes with torch."""
    found = find_spec("torch")
    folders = [] if found is None else found.submodule_search_locations or []
    return [path for folder in folders for path in Path(folder).glob("lib/libgomp*.so*")]


def spins(role: str, *flags: str) -> list[int]:
    """What libgomp says of itself when a server that is given these flags loads it, each time."""
    waiting = (SPIN_COUNT, "OMP_WAIT_POLICY")
    environ = {name: value for name, value in os.environ.items() if name not in waiting}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(libgomp()[0]), role, *flags],
        cwd=Path(__file__).parents[2],
        env={**environ, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "that was all" in done.stderr, done.stderr
    return [int(count) for count in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)]


@pytest.mark.skipif(not libgomp(), reason="torch has no libgomp here")
def test_a_servers_threads_wait_briefly_unless_it_was_told_its_share() -> None:
    assert spins("decode") == [SPINS]
    (long,) = spins("decode", "--threads", "2")
    assert long > PREFILL_SPINS
    assert spins("prefill", "--threads", "2") == [PREFILL_SPINS]


@pytest.mark.parametrize(
    ("role", "threads", "crowded", "waits"),
    [
        ("prefill", 0, False, SPINS),
        ("prefill", 2, False, PREFILL_SPINS),
        ("prefill", 2, True, PREFILL_SPINS),
        ("decode", 0, False, SPINS),
        ("decode", 2, False, None),
        ("decode", 2, True, SPINS),
    ],
)
def test_how_long_threads_wait_follows_from_what_shares_their_cores(
    role: str, threads: int, crowded: bool, waits: int | None
) -> None:
    environ: dict[str, str] = {}
    assert wait_as_fits(environ, role, threads, crowded) == (waits is not None)
    assert environ == ({} if waits is None else {SPIN_COUNT: str(waits)})


@pytest.mark.parametrize("told", [{"OMP_WAIT_POLICY": "active"}, {SPIN_COUNT: "77"}])
def test_how_a_process_was_told_to_wait_stays(told: dict[str, str]) -> None:
    environ = dict(told)
    assert not wait_as_fits(environ, "prefill", 0) and environ == told
    plan = ClusterPlan(prefill=64, decode=64, flags=("--threads", "64"))
    assert plan.environment("decode", told) == told


@pytest.mark.parametrize(
    ("plan", "decode", "prefill"),
    [
        (ClusterPlan(), None, None),
        (ClusterPlan(aggregated=True, flags=("--threads", "4")), None, None),
        (ClusterPlan(flags=("--threads", "2")), None, None),
        (ClusterPlan(flags=("--threads", "4")), SPINS, PREFILL_SPINS),
        (ClusterPlan(flags=("--threads", "2", "--threads", "3")), SPINS, PREFILL_SPINS),
        (ClusterPlan(decode=2, flags=("--threads", "2")), SPINS, PREFILL_SPINS),
        (ClusterPlan(engine="sim"), None, None),
    ],
)
def test_up_tells_servers_with_more_threads_than_cores_together(
    plan: ClusterPlan,
    decode: int | None,
    prefill: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "_cores", lambda: 4)
    for role, waits in (("decode", decode), ("prefill", prefill), ("router", None)):
        told = {} if waits is None else {SPIN_COUNT: str(waits)}
        assert plan.environment(role, {"HOME": "/"}) == {"HOME": "/", **told}
