"""S2: requests for a free D go on at full speed, however many wait for one that takes no KV."""

from __future__ import annotations

import asyncio
import threading

from pd_grpc.v1 import prefill_pb2, sampling_pb2, types_pb2
from tests.prefill.cluster import Cluster, Request
from tests.waiting import LIMIT_S, until


def _request(endpoint: str, seed: int) -> Request:
    tokens = [3 + (seed * 131 + i) % 30000 for i in range(60)]
    sampling = sampling_pb2.SamplingParams(max_tokens=4, temperature=0.0)
    return Request(tokens, sampling, [prefill_pb2.DecodeTarget(endpoint=endpoint)])


async def test_a_decode_that_takes_no_kv_delays_only_its_own_requests() -> None:
    cluster = Cluster()
    go_on = threading.Event()
    try:
        # Two requests fill P's pool; D0's bulk loop stands still until the test lets it go on.
        p = await cluster.prefill(num_blocks=32, kv_progress_s=30.0)
        stuck = await cluster.decode(kv_progress_s=30.0)
        free = await cluster.decode()
        stuck.bulk._loop.call_soon_threadsafe(go_on.wait)
        waiting = [_request(stuck.endpoint, n) for n in range(12)]
        legs = [asyncio.ensure_future(cluster.run_generate(stuck, r)) for r in waiting]
        legs += [asyncio.ensure_future(cluster.run_prefill(p, r)) for r in waiting]
        await until(lambda: types_pb2.TRANSFER_STATE_SENDING in _states(p))
        for n in range(20, 24):
            request = _request(free.endpoint, n)
            generate = asyncio.ensure_future(cluster.run_generate(free, request))
            outcome = await asyncio.wait_for(cluster.run_prefill(p, request), LIMIT_S)
            assert outcome.fault is None
            assert len((await generate).tokens) == 4
        assert types_pb2.TRANSFER_STATE_SENDING in _states(p), "D0 still takes nothing"
        go_on.set()
        assert [outcome.fault for outcome in await asyncio.gather(*legs)] == [None] * len(legs)
        await cluster.all_returned()
    finally:
        go_on.set()
        await cluster.close()


def _states(p: object) -> set[int]:
    return {info.state for info in p.view.transfers()}  # type: ignore[attr-defined]
