"""S1: P prepares many requests at once; a slow D stops none that is prepared already."""

from __future__ import annotations

import asyncio

from tests.prefill.cluster import answer_to, request_to, running
from tests.waiting import LIMIT_S, until

WAITING = 40


async def test_a_slow_decode_stops_no_request_that_is_prepared() -> None:
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode()
        prepared = [request_to(d, random_seed=n) for n in range(4)]
        late = [request_to(d, random_seed=n) for n in range(10, 10 + WAITING)]
        # P has no block to compute with yet, so that what D grants now stays prepared; then D has
        # no block for anybody else, and the Allocates of all others wait there.
        held = p.pool.reserve(p.pool.free, owner="the test")
        pool = p.machine.placement.pool
        first = [asyncio.create_task(cluster.run(p, d, request)) for request in prepared]
        await until(lambda: pool.granted == len(prepared))
        taken = d.pool.reserve(d.pool.free, owner="the test")
        rest = [asyncio.create_task(cluster.run(p, d, request)) for request in late]
        await until(lambda: pool.in_flight > 30)
        held.release()
        p.runtime.wake()
        outcomes = await asyncio.wait_for(asyncio.gather(*first), LIMIT_S)
        assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in prepared]
        # D had no block for them but those that the first have given back since.
        assert not all(task.done() for task in rest), "the others still wait for D"
        taken.release()
        d.runtime.wake()
        outcomes = await asyncio.gather(*rest)
        assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in late]
