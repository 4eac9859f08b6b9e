"""S2: requests for a free D go on, however many wait for one that is full or never answers."""

from __future__ import annotations

import asyncio

import pytest

from pd_grpc.blocks.pool import Holding
from pd_grpc.decode.server import DecodeServer, start_decode
from pd_grpc.decode.service import Context, DecodeService
from pd_grpc.engine.sim import SimEngine
from pd_grpc.prefill.server import PrefillServer
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.v1 import decode_pb2
from tests.prefill.cluster import SMALL, Cluster, answer_to, request_to, running
from tests.waiting import until

WAITING = 100
AT_ONCE_S = 30.0
"""Against the minute that those for the bad D have."""


class Silent(DecodeService):
    """Takes every Allocate and never answers."""

    async def Allocate(
        self, request: decode_pb2.AllocateRequest, context: Context
    ) -> decode_pb2.AllocateResponse:
        never: asyncio.Future[decode_pb2.AllocateResponse]
        never = asyncio.get_running_loop().create_future()
        return await never


async def silent_decode(cluster: Cluster) -> DecodeServer:
    config = DecodeConfig.model_validate(SMALL)
    d = await start_decode(config, SimEngine(config), decode_service=Silent)
    cluster.decodes.append(d)
    cluster.pools.append(d.pool)
    return d


@pytest.mark.parametrize("how", ["full", "silent"])
async def test_a_decode_that_grants_nothing_delays_only_its_own_requests(how: str) -> None:
    async with running() as cluster:
        # A whole window waits there, and more behind it than may be prepared ahead.
        p = await cluster.prefill(prepare_ahead=2)
        free = await cluster.decode()
        taken: Holding | None = None
        if how == "full":
            bad = await cluster.decode()
            taken = bad.pool.reserve(bad.pool.free, owner="the test")
        else:
            bad = await silent_decode(cluster)
        stuck = [
            asyncio.create_task(cluster.run_prefill(p, request_to(bad, random_seed=n)))
            for n in range(WAITING)
        ]
        await until(lambda: _waits(p, bad) == WAITING)
        window = p.machine.placement.pool.in_flight
        good = [request_to(free, random_seed=n) for n in range(200, 212)]
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(cluster.run(p, free, request) for request in good)), AT_ONCE_S
        )
        assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in good]
        assert 0 < window < WAITING
        assert p.machine.placement.pool.in_flight == window, "the others wait as they did"
        for leg in stuck:
            leg.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        await until(lambda: p.machine.placement.pool.in_flight == 0)
        if taken is not None:
            taken.release()


def _waits(p: PrefillServer, d: DecodeServer) -> int:
    pool = p.machine.placement.pool
    return pool.in_flight + pool.waiting_for(d.endpoint)
