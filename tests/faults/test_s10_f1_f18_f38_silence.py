"""S10, F1, F18, F38: what P owes and never sends. D's wait ends, its client hears why, and every
block comes back on both sides."""

from __future__ import annotations

import asyncio
from typing import Any

from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.refs import key_of
from pd_grpc.testing.faults import Direction, Injector, Kind, Rule
from pd_grpc.v1 import prefill_pb2_grpc
from tests.faults.breakers import may_ask
from tests.prefill.cluster import Outcome, answer_to, request_to, running
from tests.waiting import LIMIT_S, until

FROZEN: dict[str, Any] = {"heartbeat_s": 1.5, "lease_s": 1.2, "grace_s": 0.5}
"""The lease of a grant that no heartbeat renews ends before the session is found silent."""


def fault_of(outcome: Outcome) -> Fault:
    assert isinstance(outcome.fault, Fault), outcome.fault
    return outcome.fault


def handed_off(outcome: Outcome) -> bool:
    return any(message.HasField("handed_off") for message in outcome.messages)


async def test_a_first_token_that_never_comes_ends_the_wait_for_it() -> None:
    """S10: P lives, and heartbeats; its first token is lost on the way."""
    lost = Rule(Kind.DROP, "SendFirstToken")
    faults = Injector(lost)
    async with running() as cluster:
        p = await cluster.prefill(faults=faults, call_s=1.0)
        d = await cluster.decode(first_token_s=1.5)
        prefill, generate = await asyncio.wait_for(cluster.run(p, d, request_to(d)), LIMIT_S)
        assert faults.strikes(lost) >= 1
        assert fault_of(generate).code is Code.DEADLINE_EXCEEDED
        assert fault_of(generate).metadata["stage"] == "first_token"
        assert generate.tokens == []
        assert fault_of(prefill).reason is Reason.STAGE_DEADLINE and not handed_off(prefill)
        await cluster.all_returned()
        faults.clear()
        await until(lambda: may_ask(p))
        again = request_to(d, random_seed=2)
        assert (await cluster.run(p, d, again))[1].tokens == answer_to(again)


async def test_a_lease_that_a_frozen_p_does_not_renew_ends() -> None:
    """S10: nothing of P arrives any more once it has its grant."""
    faults = Injector(Rule(Kind.DROP, "Session", messages=range(2, 1000)))
    async with running() as cluster:
        p, d = await cluster.prefill(faults=faults), await cluster.decode(**FROZEN)
        taken = p.pool.reserve(p.pool.free, owner="the test")
        prefill, generate = await asyncio.wait_for(cluster.run(p, d, request_to(d)), LIMIT_S)
        assert generate.tokens == []
        assert fault_of(generate).reason is Reason.LEASE_EXPIRED
        assert fault_of(generate).code is Code.UNAVAILABLE
        assert fault_of(prefill).reason is Reason.LEASE_EXPIRED
        await until(lambda: d.pool.free == d.pool.total and not d.machine.ledger.transfers)
        taken.release()


async def test_an_abort_that_d_never_hears_of_ends_with_the_lease() -> None:
    """F1: the client goes while its request waits, and P stays silent about it."""
    silent = [Rule(Kind.DROP, "Session", messages=range(2, 1000)), Rule(Kind.DROP, "Release")]
    faults = Injector(*silent)
    async with running() as cluster:
        p = await cluster.prefill(faults=faults, call_s=0.3)
        d = await cluster.decode(**FROZEN)
        taken = p.pool.reserve(p.pool.free, owner="the test")
        stub = prefill_pb2_grpc.PrefillServiceStub(cluster.channel(p.endpoint))
        request = request_to(d)
        call = stub.Prefill(request.prefill(), timeout=60)
        await until(lambda: d.pool.free < d.pool.total)
        call.cancel()
        await until(lambda: faults.strikes(silent[1]) == 1)
        assert d.pool.free < d.pool.total, "D cannot know yet"
        await until(lambda: d.pool.free == d.pool.total)
        ledger = d.machine.ledger
        ended = ledger.tombstones.get(key_of(request.ref), ledger.now)
        assert ended is not None and ended.state is DecodeState.EXPIRED
        taken.release()


async def test_kv_that_stops_coming_ends_its_transfer() -> None:
    """F18: D is receiving, and the rest never comes, nor its end; P heartbeats all the while."""
    lost = Rule(Kind.DROP, "Transfer", messages=range(3, 1000))
    faults = Injector(lost)
    async with running() as cluster:
        p = await cluster.prefill(faults=faults, kv_progress_s=2.0)
        d = await cluster.decode(kv_progress_s=2.0)
        prefill, generate = await asyncio.wait_for(cluster.run(p, d, request_to(d)), LIMIT_S)
        assert faults.strikes(lost) >= 1
        for outcome in (prefill, generate):
            assert fault_of(outcome).reason is Reason.DECODE_LOST
            assert "stage 'transfer'" in fault_of(outcome).message
        assert not handed_off(prefill) and len(generate.tokens) <= 1, "only P's own token"


async def test_acks_that_never_come_are_no_success() -> None:
    """F38: D has everything, and P hears nothing of it: its wait is bounded, and the outcome is a
    failure for P's caller whatever D's client has."""
    lost = Rule(Kind.DROP, "Transfer", Direction.RESPONSE, messages=range(2, 1000))
    faults = Injector(lost)
    async with running() as cluster:
        p = await cluster.prefill(faults=faults, kv_progress_s=2.0)
        d = await cluster.decode(kv_progress_s=2.0)
        request = request_to(d)
        prefill, generate = await asyncio.wait_for(cluster.run(p, d, request), LIMIT_S)
        assert faults.strikes(lost) >= 1
        # D may be done with its answer before P's wait is over, and close the stream.
        assert fault_of(prefill).reason in (Reason.DECODE_LOST, Reason.RELEASED)
        assert not handed_off(prefill)
        assert (generate.fault, generate.tokens) == (None, answer_to(request))
