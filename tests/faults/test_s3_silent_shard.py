"""S3: the wait of P's sender for what a transfer needs ends, for that transfer alone."""

from __future__ import annotations

import asyncio
import threading

from pd_grpc.protocol.faults import Fault, Reason
from tests.prefill.cluster import answer_to, request_to, running
from tests.waiting import LIMIT_S, until

PROGRESS_S = 0.5


async def test_a_shard_that_never_answers_fails_its_transfer_and_no_other() -> None:
    go_on = threading.Event()
    async with running() as cluster:
        try:
            p = await cluster.prefill(kv_progress_s=PROGRESS_S)
            mute = await cluster.decode(kv_progress_s=PROGRESS_S)
            free = await cluster.decode()
            # D's control answers and grants; the loop that takes KV stands still.
            mute.bulk._loop.call_soon_threadsafe(go_on.wait)
            lost = asyncio.create_task(cluster.run_prefill(p, request_to(mute)))
            await until(lambda: bool(p.view.transfers()))
            for n in range(4):
                request = request_to(free, random_seed=n)
                prefill, generate = await asyncio.wait_for(cluster.run(p, free, request), LIMIT_S)
                assert prefill.fault is None and generate.tokens == answer_to(request)
            outcome = await asyncio.wait_for(lost, LIMIT_S)
            assert isinstance(outcome.fault, Fault), outcome.fault
            assert outcome.fault.reason is Reason.DECODE_LOST, "another D may take it"
            again = request_to(free, random_seed=9)
            assert (await cluster.run(p, free, again))[1].tokens == answer_to(again)
        finally:
            go_on.set()
