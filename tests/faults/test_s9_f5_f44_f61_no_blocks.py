"""S9, F5, F44, F61: D has no blocks, or takes back what it gave: both sides hold nothing for the
request at once, and another D is tried."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2_grpc, types_pb2
from tests.cluster import cluster
from tests.prefill.cluster import answer_to, request_to, running
from tests.system.asking import ask, request
from tests.waiting import until

AT_ONCE_S = 15.0
"""On however slow a machine: every timer that could end a request here is far longer."""
PATIENT: dict[str, Any] = {"heartbeat_s": 60.0, "lease_s": 240.0, "kv_progress_s": 90.0}
"""No timer can be what ends a request here."""


async def test_a_refusal_recycles_nothing_and_leaves_p_nothing_to_hold() -> None:
    """S9, F5: refused before admission."""
    async with running() as servers:
        p, d = await servers.prefill(**PATIENT), await servers.decode(allocate_queue=1, **PATIENT)
        taken = d.pool.reserve(d.pool.free, owner="the test")
        before = d.pool.counts(), p.pool.counts()
        queued = asyncio.create_task(servers.run_prefill(p, request_to(d, random_seed=1)))
        await until(lambda: len(d.view.transfers()) == 1)
        asked = time.monotonic()
        refused, client = await servers.run(p, d, request_to(d, random_seed=2))
        assert time.monotonic() - asked < AT_ONCE_S
        for outcome in (refused, client):
            assert isinstance(outcome.fault, Fault)
            assert outcome.fault.code is Code.RESOURCE_EXHAUSTED
            assert outcome.fault.reason is Reason.QUEUE_FULL
            assert outcome.fault.retry_after_s is not None, "a typed refusal says when to come back"
        assert (d.pool.counts(), p.pool.counts()) == before
        assert len(p.view.transfers()) == len(d.view.transfers()) == 1, "the one that waits"
        d.pool.check()
        taken.release()
        d.runtime.wake()
        queued.cancel()
        await asyncio.wait([queued])


async def test_a_request_that_a_full_d_refuses_is_served_by_another() -> None:
    """F44: the refusal comes back to P, which turns to the next D; no client hears of it."""
    async with (
        cluster(1, 2, decode_settings={"allocate_queue": 1}) as servers,
        rpc.aio_channel(servers.router.endpoint, RouterConfig(), RouterConfig()) as channel,
    ):
        full = servers.decodes[0]
        taken = full.pool.reserve(full.pool.free, owner="the test")
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        greedy = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
        asks = [asyncio.create_task(ask(stub, request([5 + n] * 40, greedy))) for n in range(6)]
        # One waits in the queue of the full D, and is served when it has blocks again.
        await until(lambda: sum(task.done() for task in asks) == 5)
        (waiting,) = [task for task in asks if not task.done()]
        answered = {task.result().last.decode_instance for task in asks if task.done()}
        assert answered == {"d1"}
        taken.release()
        full.runtime.wake()
        assert (await waiting).last.decode_instance == "d0"


async def test_what_d_takes_back_ends_at_p_in_one_round_trip() -> None:
    """F61: D aborts while P holds the grant and has not begun."""
    async with running() as servers:
        p, d = await servers.prefill(**PATIENT), await servers.decode(**PATIENT)
        held = p.pool.reserve(p.pool.free, owner="the test")
        doomed, other = request_to(d, random_seed=1), request_to(d, random_seed=2)
        legs = [asyncio.create_task(servers.run(p, d, each)) for each in (doomed, other)]
        prepared = types_pb2.TRANSFER_STATE_PREPARED
        await until(lambda: [t.state for t in p.view.transfers()] == [prepared] * 2)
        aborted = time.monotonic()
        d.view.release(doomed.ref.transfer_id, 1, "by the test")
        prefill, generate = await legs[0]
        assert time.monotonic() - aborted < AT_ONCE_S
        for outcome in (prefill, generate):
            assert isinstance(outcome.fault, Fault) and outcome.fault.reason is Reason.RELEASED
        assert [t.ref.transfer_id for t in p.view.transfers()] == [other.ref.transfer_id]
        held.release()
        p.runtime.wake()
        assert (await legs[1])[1].tokens == answer_to(other)
