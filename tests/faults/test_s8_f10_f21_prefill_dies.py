"""S8, F10, F21: a P that is killed or freezes takes only what was its own with it, at once, and D
serves the one that takes its place."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from pd_grpc.decode.server import DecodeServer
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Code, Fault, Reason
from tests.prefill.cluster import Outcome, answer_to, request_to, running
from tests.servers.processes import ready, server
from tests.waiting import until

HEARTBEAT_S, GRACE_S = 1.0, 0.5
BEATS: dict[str, Any] = {"heartbeat_s": HEARTBEAT_S, "lease_s": 60.0, "grace_s": GRACE_S}
FLAGS = (
    *("--engine", "sim", "--name", "victim", "--sim-time-scale", "30", "--chunk-tokens", "64"),
    *("--block-size", "4", "--num-blocks", "512", "--heartbeat-s", str(HEARTBEAT_S)),
    *("--grace-s", str(GRACE_S)),
)
LATE_S = 20.0
"""For a machine that is busy with other tests."""


def _knows(d: DecodeServer, name: str) -> bool:
    return any(session.owner.name == name for session in d.machine.ledger.sessions.live())


def _state(d: DecodeServer, transfer_id: str) -> DecodeState | None:
    found = d.machine.find(transfer_id, 0)
    return None if found is None else found.state


@pytest.mark.parametrize(
    ("how", "found_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 2 * HEARTBEAT_S)]
)
async def test_d_frees_exactly_what_was_the_lost_ps_and_serves_its_successor(
    how: signal.Signals, found_s: float
) -> None:
    """S8, F10, F21"""
    async with running() as cluster:
        d = await cluster.decode(num_blocks=1024, sim_time_scale=4.0, **BEATS)
        other = await cluster.prefill(name="other", sim_time_scale=4.0, **BEATS)
        with server("prefill", *FLAGS) as process:
            endpoint = (await asyncio.to_thread(ready, process))[3]
            victim: Any = SimpleNamespace(endpoint=endpoint)
            decoding = request_to(d, tokens=20, max_tokens=150, random_seed=1, ignore_eos=True)
            owned = asyncio.create_task(cluster.run(victim, d, decoding))
            await until(lambda: _state(d, decoding.ref.transfer_id) is DecodeState.DECODING)
            doomed = [request_to(d, tokens=1500, random_seed=n) for n in (2, 3)]
            lost = [asyncio.create_task(cluster.run_generate(d, each)) for each in doomed]
            callers = [asyncio.create_task(cluster.run_prefill(victim, each)) for each in doomed]
            # P has room to compute one of them at a time.
            wanted = {DecodeState.RECEIVING, DecodeState.RESERVED}
            await until(lambda: {_state(d, r.ref.transfer_id) for r in doomed} == wanted)
            foreign = request_to(d, tokens=600, max_tokens=20, random_seed=4)
            unharmed = asyncio.create_task(cluster.run(other, d, foreign))
            await until(lambda: _state(d, foreign.ref.transfer_id) is not None)
            process.send_signal(how)
            await until(lambda: not _knows(d, "victim"), found_s + LATE_S)
            await until(
                lambda: all(_state(d, r.ref.transfer_id) is None for r in doomed), GRACE_S + LATE_S
            )
            assert not owned.done(), "what D owns goes on"
            held = {t.key.transfer_id for t in d.machine.ledger.transfers.values()}
            assert held - {foreign.ref.transfer_id} == {decoding.ref.transfer_id}
            for outcome in await asyncio.gather(*lost):
                _lost(outcome)
            again = await cluster.prefill(name="victim", **BEATS)
            fresh = request_to(d, random_seed=5)
            assert (await cluster.run(again, d, fresh))[1].tokens == answer_to(fresh)
            if how is signal.SIGSTOP:
                # It wakes up, finds that another has its name, and ends by itself.
                process.send_signal(signal.SIGCONT)
                assert await asyncio.to_thread(process.wait, 10) == 0
            for outcome in await asyncio.gather(*callers):
                assert outcome.fault is not None
            assert (await owned)[1].tokens == answer_to(decoding)
            assert (await unharmed)[1].tokens == answer_to(foreign)


def _lost(outcome: Outcome) -> None:
    assert isinstance(outcome.fault, Fault), outcome.fault
    assert (outcome.fault.code, outcome.fault.reason) == (Code.UNAVAILABLE, Reason.PREFILL_LOST)
