"""S12: what reclaims goes on while requests finish, appear and vanish, whatever is lost of them."""

from __future__ import annotations

import asyncio
import random

from pd_grpc.testing.faults import Direction, Injector, Kind, Rule
from tests.faults.breakers import may_ask
from tests.prefill.cluster import Outcome, answer_to, request_to, running
from tests.waiting import LIMIT_S, until

SEED = 12
REQUESTS = 48
CANCELLED = 0.25


async def test_leases_end_and_requests_are_served_amid_losses_of_every_kind() -> None:
    chance = random.Random(SEED)
    at_p = Injector(
        Rule(Kind.DROP, "SendFirstToken", probability=0.1),
        Rule(Kind.DROP, "Release", probability=0.3),
        Rule(Kind.DROP, "Session", messages=range(2, 1000), probability=0.2),
        Rule(Kind.DELAY, "SendFirstToken", probability=0.3, delay_s=(0.15, 1.8)),
        Rule(Kind.DUPLICATE, "Allocate", probability=0.3, delay_s=(0.0, 1.5)),
        Rule(Kind.HALF_CLOSE, "Transfer", messages=range(2, 1000), probability=0.01),
        seed=SEED,
    )
    at_d = Injector(
        Rule(Kind.DELAY, "Allocate", Direction.RESPONSE, probability=0.3, delay_s=(0.15, 1.8)),
        Rule(Kind.DROP, "SendFirstToken", Direction.RESPONSE, probability=0.1),
        seed=SEED,
    )
    async with running() as cluster:
        p = await cluster.prefill(faults=at_p, call_s=0.9, kv_progress_s=1.5)
        d = await cluster.decode(
            faults=at_d, lease_s=1.8, heartbeat_s=1.2, first_token_s=1.5, attach_s=1.5
        )
        requests = [request_to(d, random_seed=n) for n in range(REQUESTS)]

        async def one(n: int) -> tuple[Outcome, Outcome] | None:
            running = asyncio.ensure_future(cluster.run(p, d, requests[n], timeout_s=12))
            if chance.random() >= CANCELLED:
                return await running
            await asyncio.wait([running], timeout=chance.uniform(0.0, 0.9))
            running.cancel()
            await asyncio.wait([running])
            return None if running.cancelled() else running.result()

        outcomes = await asyncio.wait_for(asyncio.gather(*map(one, range(REQUESTS))), LIMIT_S)
        ended = [pair for pair in outcomes if pair is not None]
        right = 0
        for request, outcome in zip(requests, outcomes, strict=True):
            if outcome is None:
                continue
            tokens, expected = outcome[1].tokens, answer_to(request)
            assert tokens == expected[: len(tokens)]
            assert (outcome[1].fault is None) == (tokens == expected and bool(outcome[1].finish))
            right += outcome[1].fault is None
        assert 0 < right < len(ended), f"{right} of {len(ended)} were answered in full"
        assert at_p.strikes() > 10 and at_d.strikes() > 5
        await until(lambda: not d.machine.ledger.transfers and not p.view.transfers())
        at_p.clear()
        at_d.clear()
        await until(lambda: may_ask(p))
        again = request_to(d, random_seed=777)
        assert (await cluster.run(p, d, again))[1].tokens == answer_to(again)
