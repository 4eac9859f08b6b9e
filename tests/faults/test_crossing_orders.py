"""Words that cross on the way: a grant and a deadline, a grant and a cancel, a Release and the
Allocate before it. Each order is made here, not hoped for, and counted.

However they cross, each leg has one answer, nobody hangs, and `running` finds every block free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from pd_grpc.decode.actions import Changed
from pd_grpc.decode.server import DecodeServer
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import key_of
from pd_grpc.testing.faults import Direction, Injector, Kind, Rule
from pd_grpc.v1 import prefill_pb2_grpc
from tests.prefill.cluster import Cluster, Request, answer_to, request_to, running
from tests.waiting import LIMIT_S, until

RESPONSE = Direction.RESPONSE
MANY = 24
PATIENT: dict[str, Any] = {
    "connect_s": 60.0,
    "heartbeat_s": 60.0,
    "lease_s": 240.0,
    "kv_progress_s": 90.0,
}
"""Nothing but the words that cross ends anything here, however slow the machine is."""


def granted_on(d: DecodeServer, then: Callable[[str], None] = lambda _: None) -> set[str]:
    """The transfers that D has granted so far, by id; `then` hears of each as it happens."""
    granted: set[str] = set()

    def note(change: Changed) -> None:
        if change.after is DecodeState.RESERVED:
            granted.add(change.key.transfer_id)
            then(change.key.transfer_id)

    d.runtime.listeners.append(note)
    return granted


def nothing_left(d: DecodeServer) -> bool:
    return not d.machine.ledger.transfers and not d.view.transfers()


async def serves(cluster: Cluster, p: object, d: DecodeServer) -> None:
    """A request after all that is answered as ever."""
    request = request_to(d, random_seed=999)
    prefill, generate = await cluster.run(p, d, request)  # type: ignore[arg-type]
    assert (prefill.fault, generate.tokens) == (None, answer_to(request))


async def test_grants_that_come_when_p_has_given_up_are_given_back() -> None:
    late = Rule(Kind.DELAY, "Allocate", RESPONSE, delay_s=(0.0, 4.8))
    faults = Injector(late, seed=1)
    async with running() as cluster:
        p = await cluster.prefill(**PATIENT)
        d = await cluster.decode(num_blocks=1024, faults=faults, **PATIENT)
        granted = granted_on(d)
        requests = [request_to(d, random_seed=n) for n in range(MANY)]
        outcomes = await asyncio.gather(
            *(cluster.run(p, d, request, timeout_s=3.2) for request in requests)
        )
        crossed = 0
        for request, (prefill, generate) in zip(requests, outcomes, strict=True):
            if generate.fault is None:
                assert generate.tokens == answer_to(request)
            else:
                assert isinstance(generate.fault, Fault)
                assert generate.tokens == answer_to(request)[: len(generate.tokens)]
            if prefill.fault is not None:
                assert isinstance(prefill.fault, Fault) and generate.fault is not None
                assert prefill.fault.reason is Reason.STAGE_DEADLINE
                crossed += request.ref.transfer_id in granted
        assert crossed >= 3, f"{crossed} of {MANY} were granted when P had given up"
        await until(lambda: nothing_left(d))
        faults.clear()
        await serves(cluster, p, d)


async def test_grants_whose_asker_is_cancelled_at_that_moment_are_given_back() -> None:
    faults = Injector(Rule(Kind.DELAY, "Allocate", RESPONSE, delay_s=(0.01, 0.2)), seed=2)
    async with running() as cluster:
        p = await cluster.prefill(**PATIENT)
        d = await cluster.decode(num_blocks=1024, faults=faults, **PATIENT)
        calls: dict[str, grpc.aio.Call] = {}
        granted = granted_on(d, then=lambda transfer_id: _cancel(calls.get(transfer_id)))
        stub = prefill_pb2_grpc.PrefillServiceStub(cluster.channel(p.endpoint))
        requests = [request_to(d, random_seed=n) for n in range(MANY)]
        generates = [asyncio.create_task(cluster.run_generate(d, r)) for r in requests]
        for request in requests:
            calls[request.ref.transfer_id] = stub.Prefill(request.prefill(), timeout=60)
        answers = await asyncio.wait_for(asyncio.gather(*generates), LIMIT_S)
        assert granted == calls.keys(), "each was cancelled after its grant, before P heard of it"
        for answer in answers:
            assert isinstance(answer.fault, Fault) and answer.tokens == []
            assert answer.fault.reason is Reason.CLIENT_GONE
        codes = [await call.code() for call in calls.values()]
        assert codes == [grpc.StatusCode.CANCELLED] * MANY
        await until(lambda: nothing_left(d))
        faults.clear()
        await serves(cluster, p, d)


async def test_a_release_that_overtakes_its_allocate_leaves_nothing_to_grant() -> None:
    at_p = Injector(
        Rule(Kind.DROP, "Allocate"), held := Rule(Kind.DUPLICATE, "Allocate", delay_s=(3.0, 3.5))
    )
    at_d = Injector()
    arrived = at_d.add(Rule(Kind.DELAY, "Allocate", delay_s=0.001))
    async with running() as cluster:
        p = await cluster.prefill(faults=at_p, **PATIENT)
        d = await cluster.decode(faults=at_d, **PATIENT)
        granted = granted_on(d)
        stub = prefill_pb2_grpc.PrefillServiceStub(cluster.channel(p.endpoint))
        requests = [request_to(d, random_seed=n) for n in range(MANY)]
        calls = [stub.Prefill(request.prefill(), timeout=60) for request in requests]
        await until(lambda: at_p.strikes(held) == MANY)
        for call in calls:
            call.cancel()
        await until(lambda: all(_released(d, request) for request in requests))
        assert at_d.strikes(arrived) == 0, "each Release came first"
        await until(lambda: at_d.strikes(arrived) == MANY)
        at_p.clear()
        await serves(cluster, p, d)
        assert len(granted) == 1 and nothing_left(d), "the held ones were granted nothing"


def _cancel(call: grpc.aio.Call | None) -> None:
    if call is not None:
        call.cancel()


def _released(d: DecodeServer, request: Request) -> bool:
    ledger = d.machine.ledger
    return ledger.tombstones.get(key_of(request.ref), ledger.now) is not None
