"""S11, F3, F39: words that come late or twice change nothing, and are counted."""

from __future__ import annotations

import asyncio

from pd_grpc.decode.server import DecodeServer
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Code, Fault
from pd_grpc.protocol.refs import key_of
from pd_grpc.testing.faults import Injector, Kind, Rule
from tests.prefill.cluster import Request, answer_to, request_to, running
from tests.waiting import LIMIT_S, until


def remembered(d: DecodeServer, request: Request) -> DecodeState | None:
    """The state in which a transfer has ended."""
    ledger = d.machine.ledger
    ended = ledger.tombstones.get(key_of(request.ref), ledger.now)
    return None if ended is None else ended.state


def held_by_the_network(method: str, delay_s: float) -> list[Rule]:
    """What makes a call arrive late, even if its caller has given up."""
    return [
        Rule(Kind.DROP, method, times=1),
        Rule(Kind.DUPLICATE, method, times=1, delay_s=delay_s),
    ]


async def test_a_first_token_after_reclaim_is_refused_safely() -> None:
    """S11: D has taken its blocks back, and another request uses them by then."""
    faults, at_d = Injector(*held_by_the_network("SendFirstToken", 3.0)), Injector()
    arrived = at_d.add(Rule(Kind.DELAY, "SendFirstToken", delay_s=0.001))
    async with running() as cluster:
        p = await cluster.prefill(faults=faults, call_s=2.0)
        d = await cluster.decode(faults=at_d, first_token_s=1.5)
        request = request_to(d)
        _, generate = await asyncio.wait_for(cluster.run(p, d, request), LIMIT_S)
        assert isinstance(generate.fault, Fault)
        assert generate.fault.code is Code.DEADLINE_EXCEEDED and generate.tokens == []
        assert remembered(d, request) is DecodeState.FAILED and at_d.strikes(arrived) == 0
        await until(lambda: d.pool.free == d.pool.total)
        late = d.machine.ledger.late_events
        other = request_to(d, random_seed=2)
        assert (await cluster.run(p, d, other))[1].tokens == answer_to(other)
        await until(lambda: at_d.strikes(arrived) == 2)
        await until(lambda: d.machine.ledger.late_events > late)
        assert remembered(d, request) is DecodeState.FAILED


async def test_a_first_token_just_before_reclaim_disarms_it() -> None:
    """S11: the answer lasts longer than the wait for its first token may."""
    faults = Injector(Rule(Kind.DELAY, "SendFirstToken", delay_s=0.3))
    async with running() as cluster:
        p = await cluster.prefill(faults=faults)
        d = await cluster.decode(first_token_s=3.0, sim_time_scale=15.0)
        request = request_to(d, max_tokens=50, ignore_eos=True)
        began = asyncio.get_running_loop().time()
        prefill, generate = await cluster.run(p, d, request)
        assert (prefill.fault, generate.tokens) == (None, answer_to(request))
        assert asyncio.get_running_loop().time() - began > 3.0


async def test_every_call_of_p_made_twice_is_as_good_as_once() -> None:
    """F3."""
    twice = [
        Rule(Kind.DUPLICATE, method, delay_s=(0.0, 0.1))
        for method in ("Allocate", "SendFirstToken", "Release")
    ]
    beats = Rule(Kind.DUPLICATE, "Session", messages=range(2, 1000))
    faults = Injector(*twice, beats, seed=3)
    async with running() as cluster:
        p, d = await cluster.prefill(faults=faults), await cluster.decode(attach_s=5.0)
        requests = [request_to(d, random_seed=n) for n in range(12)]
        gone = [request_to(d, random_seed=n) for n in range(50, 54)]
        legs = [asyncio.create_task(cluster.run_prefill(p, r)) for r in gone]
        outcomes = await asyncio.gather(*(cluster.run(p, d, r) for r in requests))
        for leg in legs:
            leg.cancel()
        for request, (prefill, generate) in zip(requests, outcomes, strict=True):
            assert (prefill.fault, generate.tokens) == (None, answer_to(request))
        await until(lambda: not d.machine.ledger.transfers)
        assert faults.strikes(twice[0]) >= 16 and faults.strikes(twice[1]) >= 12
        await until(lambda: d.machine.ledger.late_events >= 12)


async def test_an_end_is_not_overwritten_by_success() -> None:
    """F39: the client has gone; KV and first token come after that."""
    faults, at_d = Injector(*held_by_the_network("SendFirstToken", 2.0)), Injector()
    arrived = at_d.add(Rule(Kind.DELAY, "SendFirstToken", delay_s=0.001))
    async with running() as cluster:
        p = await cluster.prefill(faults=faults, call_s=0.5)
        d = await cluster.decode(faults=at_d)
        request = request_to(d)
        generate = asyncio.create_task(cluster.run_generate(d, request))
        prefill = asyncio.create_task(cluster.run_prefill(p, request))
        await until(lambda: faults.strikes() == 2)
        generate.cancel()
        await until(lambda: remembered(d, request) is not None)
        state = remembered(d, request)
        assert state in (DecodeState.RELEASED, DecodeState.FAILED)
        assert (await asyncio.wait_for(prefill, LIMIT_S)).fault is not None
        late = d.machine.ledger.late_events
        await until(lambda: at_d.strikes(arrived) == 1 and d.machine.ledger.late_events > late)
        assert remembered(d, request) is state
        await until(lambda: d.pool.free == d.pool.total)
