"""S5: a second request with an id that is in flight is refused, on router, P and D; the first is
unharmed."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2_grpc
from tests.cluster import cluster
from tests.prefill.cluster import Outcome, answer_to, request_to, running
from tests.system.asking import request
from tests.waiting import until


def refused(outcome: Outcome, reason: Reason) -> None:
    assert isinstance(outcome.fault, Fault), outcome.fault
    assert (outcome.fault.code, outcome.fault.reason) == (Code.ALREADY_EXISTS, reason)


async def test_a_second_leg_of_a_transfer_in_flight_is_refused_by_p_and_by_d() -> None:
    async with running() as servers:
        p, d = await servers.prefill(), await servers.decode()
        taken = d.pool.reserve(d.pool.free, owner="the test")
        twice = request_to(d)
        first = asyncio.create_task(servers.run(p, d, twice))
        await until(
            lambda: p.machine.placement.pool.in_flight == 1 and len(d.view.transfers()) == 1
        )
        refused(await servers.run_prefill(p, twice), Reason.DUPLICATE_TRANSFER)
        await until(lambda: bool(d.machine.ledger.transfers))
        refused(await servers.run_generate(d, twice), Reason.DUPLICATE_TRANSFER)
        assert p.machine.placement.pool.in_flight == 1, "nothing was scheduled for the second"
        taken.release()
        d.runtime.wake()
        prefill, generate = await first
        assert (prefill.fault, generate.tokens) == (None, answer_to(twice))


async def test_a_second_request_with_a_name_in_flight_is_refused_by_the_router() -> None:
    slow = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
    async with (
        cluster(sim_time_scale=1.0) as servers,
        rpc.aio_channel(servers.router.endpoint, RouterConfig(), RouterConfig()) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        first = stub.Generate(request([5] * 20, slow, name="mine"), timeout=60)
        answers = aiter(first)
        await anext(answers)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Generate(request([5] * 20, slow, name="mine"), timeout=60):
                pass
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault)
        assert (fault.code, fault.reason) == (Code.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST)
        assert sum(len(p.view.transfers()) for p in servers.prefills) <= 1
        last = None
        async for message in answers:
            last = message
        assert last is not None and last.usage.completion_tokens == 200
