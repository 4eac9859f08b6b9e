"""A D in a network of its own, whose cable is pulled and put back: no connection closes, both sides
free what they held for each other, and go on when it is back.

It takes root and network namespaces. `test_silent_links` shows the same anywhere, without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pd_grpc.prefill.breaker import BreakerState
from pd_grpc.prefill.server import PrefillServer
from pd_grpc.prefill.sessions import Phase
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.prefill.cluster import answer_to, request_to, running
from tests.router.test_end_to_end import until_nothing_is_held
from tests.servers.processes import END_S, ready
from tests.waiting import LIMIT_S, until

HEARTBEAT_S, GRACE_S = 1.0, 0.5
LATE_S = 20.0
OPEN = BreakerState.OPEN
HERE, THERE = "10.213.77.1", "10.213.77.2"
BEATS: dict[str, Any] = {"heartbeat_s": HEARTBEAT_S, "lease_s": 10.0, "grace_s": GRACE_S}
FLAGS = (
    *("--engine", "sim", "--block-size", "4", "--num-blocks", "512", "--host", THERE),
    *("--heartbeat-s", str(HEARTBEAT_S), "--lease-s", "10", "--grace-s", str(GRACE_S)),
)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


class Cable:
    """A namespace with one cable from here."""

    def __init__(self) -> None:
        self.namespace = f"pd-{os.getpid()}"
        self._near, self._far = f"pdn{os.getpid()}", f"pdf{os.getpid()}"

    def lay(self) -> None:
        """CalledProcessError where that cannot be."""
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far)
        _ip("link", "set", self._far, "netns", self.namespace)
        _ip("addr", "add", f"{HERE}/30", "dev", self._near)
        _ip("link", "set", self._near, "up")
        _ip("-n", self.namespace, "addr", "add", f"{THERE}/30", "dev", self._far)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        self.put_back()

    def pull(self) -> None:
        _ip("-n", self.namespace, "link", "set", self._far, "down")

    def put_back(self) -> None:
        _ip("-n", self.namespace, "link", "set", self._far, "up")

    def take_away(self) -> None:
        """With whatever of it there is; a namespace takes its end of the cable with it."""
        for words in (("link", "del", self._near), ("netns", "del", self.namespace)):
            subprocess.run(["ip", *words], capture_output=True, timeout=60)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and iproute2")
    laid = Cable()
    try:
        try:
            laid.lay()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made: {error.stderr.strip()}")
        yield laid
    finally:
        laid.take_away()


@contextlib.contextmanager
def _decode_behind(cable: Cable) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "pd_grpc.servers.decode", *FLAGS]
    process = subprocess.Popen(
        ["ip", "netns", "exec", cable.namespace, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=END_S)


def _now(p: PrefillServer) -> float:
    return p.runtime._clock.now()


async def _state(endpoint: str, transfer_id: str) -> admin_pb2.TransferInfo:
    async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as channel:
        asked = admin_pb2.GetTransferRequest(transfer_id=transfer_id)
        answer: admin_pb2.GetTransferResponse = await admin_pb2_grpc.AdminServiceStub(
            channel
        ).GetTransfer(asked, timeout=60, wait_for_ready=True)
        return answer.transfer


async def test_a_pulled_cable_frees_both_ends_and_is_put_back(cable: Cable) -> None:
    async with running() as cluster:
        with _decode_behind(cable) as process:
            endpoint = (await asyncio.to_thread(ready, process))[3]
            d: Any = SimpleNamespace(endpoint=endpoint)
            # As our own client does, the test pings, or it would keep a connection that is none.
            pinging = Timeouts(heartbeat_s=HEARTBEAT_S)
            cluster._channels[endpoint] = rpc.aio_channel(endpoint, pinging, Sizes())
            p = await cluster.prefill(
                sim_time_scale=20.0, chunk_tokens=64, session_idle_s=0.5, **BEATS
            )
            cut = request_to(endpoint, tokens=800)
            generate = asyncio.create_task(cluster.run_generate(d, cut, 60))
            prefill = asyncio.create_task(cluster.run_prefill(p, cut))
            flying = p.machine.requests.in_flight
            await until(lambda: any(record.acked_bytes for record in flying.values()))
            cable.pull()
            sessions = p.machine.conversations
            broken = 2 * HEARTBEAT_S + LATE_S
            await until(lambda: all(s.phase is not Phase.OPEN for s in sessions.all()), broken)
            outcome = await asyncio.wait_for(prefill, GRACE_S + LATE_S)
            assert isinstance(outcome.fault, Fault) and outcome.fault.reason is Reason.DECODE_LOST
            cable.put_back()
            ended = await _state(endpoint, cut.ref.transfer_id)
            assert ended.HasField("last_error"), "D has found it out for itself"
            assert 0 < ended.state_age.ToTimedelta().total_seconds() < broken
            assert (await generate).fault is not None
            again = request_to(endpoint, tokens=30, random_seed=2)
            await until(lambda: not p.machine.conversations.all())
            lanes = p.machine.placement.pool.lanes
            await until(lambda: all(lane.breaker is not OPEN for lane in lanes(_now(p))))
            prefill_leg, answer = await cluster.run(p, d, again)
            assert (prefill_leg.fault, answer.fault) == (None, None)
            assert answer.tokens == answer_to(again)
            await asyncio.wait_for(until_nothing_is_held(endpoint), LIMIT_S)
