"""S7: P cannot reach D: the client has an error at once, and P holds nothing for it."""

from __future__ import annotations

import asyncio

from pd_grpc.prefill.breaker import BreakerState
from pd_grpc.protocol.faults import Code, Fault, Reason
from tests.lines import line_to
from tests.prefill.cluster import answer_to, request_to, running
from tests.waiting import LIMIT_S, until

NOBODY = "127.0.0.1:1"
CONNECT_S = 90.0
"""More than anybody here waits."""


async def test_an_address_where_nobody_listens_is_an_error_at_once() -> None:
    async with running() as cluster:
        p = await cluster.prefill(connect_s=CONNECT_S)
        asked = (cluster.run_prefill(p, request_to(NOBODY, random_seed=n)) for n in range(8))
        outcomes = await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)
        for outcome in outcomes:
            assert isinstance(outcome.fault, Fault)
            assert (outcome.fault.code, outcome.fault.reason) == (
                Code.UNAVAILABLE,
                Reason.DECODE_LOST,
            )
        assert p.view.transfers() == []


async def test_a_d_that_is_cut_off_fails_what_it_had_and_is_served_when_it_is_back() -> None:
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode()
        async with line_to(d.endpoint) as line:
            taken = d.pool.reserve(d.pool.free, owner="the test")
            waiting = asyncio.create_task(cluster.run_prefill(p, request_to(line.endpoint)))
            await until(lambda: p.machine.placement.pool.in_flight == 1)
            await line.cut()
            outcome = await asyncio.wait_for(waiting, LIMIT_S)
            assert isinstance(outcome.fault, Fault) and outcome.fault.reason is Reason.DECODE_LOST
            refused = await cluster.run_prefill(p, request_to(line.endpoint, random_seed=2))
            assert isinstance(refused.fault, Fault) and refused.fault.reason is Reason.DECODE_LOST
            await line.mend()
            taken.release()
            d.runtime.wake()
            await until(lambda: _breaker(p) is not BreakerState.OPEN)
            request = request_to(line.endpoint, random_seed=3)
            prefill, generate = await cluster.run(p, d, request)
            assert (prefill.fault, generate.tokens) == (None, answer_to(request))


def _breaker(p: object) -> BreakerState:
    lanes = p.machine.placement.pool.lanes(p.runtime._clock.now())  # type: ignore[attr-defined]
    return lanes[0].breaker if lanes else BreakerState.CLOSED
