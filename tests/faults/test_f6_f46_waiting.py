"""F6, F46: waiting is not failing, and takes no more time than the request has."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from pd_grpc.prefill.server import PrefillServer
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.testing.faults import Injector, Kind, Rule
from pd_grpc.v1 import prefill_pb2_grpc, types_pb2
from tests.prefill.cluster import answer_to, request_to, running
from tests.waiting import LIMIT_S, until

LEASE_S = 2.0
BEATS = 7
SHORT: dict[str, Any] = {"heartbeat_s": 0.5, "lease_s": LEASE_S}


async def test_a_grant_lives_while_p_is_busy_and_a_place_in_the_queue_while_d_is() -> None:
    """F6: two leases pass, first in D's queue and then before P computes."""
    counting = Rule(Kind.DELAY, "Session", messages=range(2, 1000), delay_s=0.001)
    beats = Injector(counting)
    async with running() as cluster:
        p, d = await cluster.prefill(faults=beats, **SHORT), await cluster.decode(**SHORT)
        busy_d = d.pool.reserve(d.pool.free, owner="the test")
        busy_p = p.pool.reserve(p.pool.free, owner="the test")
        request = request_to(d)
        legs = asyncio.create_task(cluster.run(p, d, request))
        for state, busy in (
            (types_pb2.TRANSFER_STATE_ALLOCATING, busy_d),
            (types_pb2.TRANSFER_STATE_PREPARED, busy_p),
        ):
            await until(partial(_all_are, p, state))
            enough, began = beats.strikes(counting) + BEATS, time.monotonic()
            await until(partial(_struck, beats, counting, enough))
            assert time.monotonic() - began > 1.5 * LEASE_S and not legs.done()
            busy.release()
            d.runtime.wake()
            p.runtime.wake()
        prefill, generate = await asyncio.wait_for(legs, LIMIT_S)
        assert (prefill.fault, generate.tokens) == (None, answer_to(request))


async def test_who_waits_for_blocks_hears_a_cancel_at_once() -> None:
    """F46."""
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode()
        busy = d.pool.reserve(d.pool.free, owner="the test")
        stub = prefill_pb2_grpc.PrefillServiceStub(cluster.channel(p.endpoint))
        call = stub.Prefill(request_to(d).prefill(), timeout=60)
        await until(lambda: bool(d.machine.ledger.transfers))
        call.cancel()
        await until(lambda: not d.machine.ledger.transfers and not p.view.transfers())
        busy.release()


async def test_what_is_left_of_a_request_only_falls_from_hop_to_hop() -> None:
    """F46: P first waits for its session with D, and what that took is gone from D's budget."""
    away_s, whole_s, margin_s = 0.5, 5.0, 2.0
    faults = Injector(Rule(Kind.DELAY, "Session", messages={1}, delay_s=away_s))
    async with running() as cluster:
        p = await cluster.prefill(faults=faults, hop_margin_s=margin_s)
        d = await cluster.decode()
        busy = d.pool.reserve(d.pool.free, owner="the test")
        leg = asyncio.create_task(cluster.run_prefill(p, request_to(d), timeout_s=whole_s))
        await until(lambda: bool(d.machine.ledger.transfers))
        ledger = d.machine.ledger
        (transfer,) = ledger.transfers.values()
        assert transfer.budget_until - transfer.created <= whole_s - away_s
        outcome = await leg
        assert isinstance(outcome.fault, Fault), "ours came before the caller's own timer"
        assert outcome.fault.code is Code.DEADLINE_EXCEEDED
        assert outcome.fault.reason is Reason.STAGE_DEADLINE
        assert outcome.fault.metadata["stage"] == "allocate"
        busy.release()


def _all_are(p: PrefillServer, state: int) -> bool:
    return [info.state for info in p.view.transfers()] == [state]


def _struck(injector: Injector, rule: Rule, times: int) -> bool:
    return injector.strikes(rule) >= times
