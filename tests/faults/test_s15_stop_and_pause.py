"""S15: stopping ends the pool and all that is in flight and leaves no thread; a pause stops what is
new, and resuming goes on."""

from __future__ import annotations

import asyncio
import itertools
import threading

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import admin_pb2, types_pb2
from tests.prefill.cluster import answer_to, request_to, running
from tests.waiting import LIMIT_S, until

PREPARED = types_pb2.TRANSFER_STATE_PREPARED


def _threads() -> set[threading.Thread]:
    """Without those that asyncio lends out, which are the loop's and last as long as it does."""
    return {t for t in threading.enumerate() if not t.name.startswith("asyncio_")}


async def test_stopping_fails_what_is_in_flight_and_leaves_no_thread_behind() -> None:
    async with running() as cluster:
        d = await cluster.decode()
        threads = _threads()
        p = await cluster.prefill(prepare_window=4, prepare_ahead=2)
        held = p.pool.reserve(p.pool.free, owner="the test")
        pool = p.machine.placement.pool
        requests = [request_to(d, random_seed=n) for n in range(12)]
        legs = [asyncio.create_task(cluster.run(p, d, requests[n])) for n in range(4)]
        await until(lambda: pool.granted >= 2 and not pool.in_flight)
        taken = d.pool.reserve(d.pool.free, owner="the test")
        # These have asked for nothing yet: D knows of none of them.
        alone = [asyncio.create_task(cluster.run_prefill(p, r)) for r in requests[4:]]
        await until(lambda: len(p.view.transfers()) == len(requests))
        held.release()
        await cluster.stop(p)
        both = await asyncio.wait_for(asyncio.gather(*legs), LIMIT_S)
        outcomes = [
            *await asyncio.wait_for(asyncio.gather(*alone), LIMIT_S),
            *itertools.chain(*both),
        ]
        for outcome in outcomes:
            assert isinstance(outcome.fault, Fault)
            assert outcome.fault.reason in (Reason.DRAINING, Reason.PREFILL_LOST)
        assert pool.in_flight == pool.granted == 0
        taken.release()
        # A thread of grpc's that carried out the last callbacks ends a moment later.
        await until(lambda: _threads() <= threads)


async def test_stopping_ends_allocates_in_flight_and_d_forgets_them() -> None:
    async with running() as cluster:
        d = await cluster.decode()
        threads = _threads()
        p = await cluster.prefill(prepare_window=4)
        taken = d.pool.reserve(d.pool.free, owner="the test")
        legs = [
            asyncio.create_task(cluster.run(p, d, request_to(d, random_seed=n))) for n in range(10)
        ]
        pool = p.machine.placement.pool
        await until(lambda: len(p.view.transfers()) == len(d.view.transfers()) == len(legs))
        await until(lambda: pool.in_flight == 4 and len(d.machine.ledger.reservations) == 4)
        await asyncio.wait_for(cluster.stop(p), LIMIT_S)
        # Those too that P had not asked D for yet: their clients wait there all the same.
        both = await asyncio.wait_for(asyncio.gather(*legs), LIMIT_S)
        for outcome in itertools.chain(*both):
            assert isinstance(outcome.fault, Fault)
            assert outcome.fault.reason in (Reason.DRAINING, Reason.PREFILL_LOST)
        assert (pool.in_flight, len(d.machine.ledger.reservations)) == (0, 0)
        assert d.view.transfers() == []
        taken.release()
        await until(lambda: _threads() <= threads)


async def test_a_pause_stops_what_is_new_and_resume_goes_on() -> None:
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode()
        before = request_to(d, random_seed=1)
        assert (await cluster.run(p, d, before))[1].tokens == answer_to(before)
        held = p.pool.reserve(p.pool.free, owner="the test")
        prepared, waiting = request_to(d, random_seed=2), request_to(d, random_seed=3)
        legs = [asyncio.create_task(cluster.run(p, d, prepared))]
        await until(lambda: _states(p.view.transfers()) == [PREPARED])
        p.pause()
        held.release()
        p.runtime.wake()
        legs.append(asyncio.create_task(cluster.run(p, d, waiting)))
        await until(lambda: len(p.view.transfers()) == 2)
        info = p.view.server_info()
        assert info.paused
        (lane,) = info.prepare
        assert (lane.in_flight, lane.ready, lane.waiting) == (0, 1, 1)
        assert _states(p.view.transfers()) == [PREPARED, types_pb2.TRANSFER_STATE_QUEUED]
        p.resume()
        outcomes = await asyncio.gather(*legs)
        assert [generate.tokens for _, generate in outcomes] == [
            answer_to(prepared),
            answer_to(waiting),
        ]
        assert not p.view.server_info().paused


async def test_a_request_that_runs_when_p_is_paused_is_finished() -> None:
    async with running() as cluster:
        p, d = await cluster.prefill(sim_time_scale=5.0), await cluster.decode()
        request = request_to(d, tokens=160)
        leg = asyncio.create_task(cluster.run(p, d, request))
        computing = [types_pb2.TRANSFER_STATE_COMPUTING]
        await until(lambda: _states(p.view.transfers()) == computing)
        p.pause()
        assert (await leg)[1].tokens == answer_to(request)


def _states(transfers: list[admin_pb2.TransferInfo]) -> list[int]:
    return [info.state for info in transfers]
