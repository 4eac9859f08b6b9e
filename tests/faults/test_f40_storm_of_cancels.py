"""F40: a storm of cancels leaves router, P and D answering, and no block behind."""

from __future__ import annotations

import asyncio
import random
from functools import partial

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2_grpc
from tests.cluster import Cluster, cluster
from tests.system.asking import ask, request
from tests.waiting import LIMIT_S, until

WAVES, AT_ONCE = 10, 40
GREEDY = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)


async def test_requests_cancelled_at_any_moment_by_the_hundred_leave_it_answering() -> None:
    numbers = random.Random(1)
    async with (
        cluster(2, 2, num_blocks=64) as running,
        rpc.aio_channel(running.router.endpoint, RouterConfig(), RouterConfig()) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for wave in range(WAVES):
            calls = [
                asyncio.create_task(ask(stub, request([3 + wave, 3 + n] * 60, GREEDY)))
                for n in range(AT_ONCE)
            ]
            # Some are under way, some wait for blocks, some have not left yet.
            await until(partial(_more_than, running, numbers.randrange(AT_ONCE)))
            numbers.shuffle(calls)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        reply = await asyncio.wait_for(ask(stub, request([7] * 60, GREEDY)), LIMIT_S)
        assert len(reply.token_ids) == 200


def _more_than(running: Cluster, some: int) -> bool:
    return len(running.router.in_flight.running()) > some
