"""S6: what is sent to several Ds succeeds or fails for each request on its own."""

from __future__ import annotations

import asyncio

from pd_grpc.protocol.faults import Fault, Reason
from tests.prefill.cluster import answer_to, request_to, running

NOBODY = "127.0.0.1:1"


async def test_every_request_hears_what_became_of_itself() -> None:
    async with running() as cluster:
        p = await cluster.prefill()
        good = await cluster.decode()
        other = await cluster.decode(block_size=8)
        small = await cluster.decode(num_blocks=8)
        wanted = {
            good.endpoint: None,
            other.endpoint: Reason.LAYOUT_MISMATCH,
            small.endpoint: Reason.TOO_LARGE,
            NOBODY: Reason.DECODE_LOST,
        }
        requests = [request_to(d, random_seed=n) for n in range(3) for d in wanted]
        mine = [r for r in requests if r.decodes[0].endpoint == good.endpoint]
        prefills, answers = await asyncio.gather(
            asyncio.gather(*(cluster.run_prefill(p, r) for r in requests)),
            asyncio.gather(*(cluster.run_generate(good, r) for r in mine)),
        )
        for request, outcome in zip(requests, prefills, strict=True):
            reason = outcome.fault.reason if isinstance(outcome.fault, Fault) else outcome.fault
            assert reason is wanted[request.decodes[0].endpoint]
            handed_off = any(m.HasField("handed_off") for m in outcome.messages)
            assert handed_off == (outcome.fault is None), "a failure is never called a success"
        assert [answer.tokens for answer in answers] == [answer_to(r) for r in mine]
