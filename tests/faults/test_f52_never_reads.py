"""F52: a client that never reads holds nothing beyond its request's time, on router and D."""

from __future__ import annotations

import grpc.aio
import pytest

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc
from tests.cluster import cluster
from tests.system.asking import request
from tests.waiting import until

pytestmark = pytest.mark.longest

# More text than grpc lets pile up for a reader that takes none.
LONG = Sampling(max_tokens=60_000, temperature=0.0, ignore_eos=True)
BUDGET = {"request_budget_s": 3.0}


@pytest.mark.parametrize("aggregated", [False, True])
async def test_a_client_that_never_reads_is_gone_when_its_time_is_over(aggregated: bool) -> None:
    async with (
        cluster(num_blocks=4096, router_settings=BUDGET, aggregated=aggregated) as running,
        rpc.aio_channel(running.router.endpoint, RouterConfig(), RouterConfig()) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request([5] * 20, LONG, name="mute"))
        await until(lambda: len(running.router.in_flight.running()) == 1)
        await until(lambda: not running.router.in_flight.running())
        again = stub.Generate(request([5] * 20, Sampling(max_tokens=2), name="mute"))
        assert [part async for part in again], "its name is free again"
        call.cancel()


async def test_a_client_of_d_that_never_reads_is_gone_when_its_time_is_over() -> None:
    async with cluster(num_blocks=4096, decode_settings=BUDGET) as running:
        d = running.decodes[0]
        watchers = d.control.handlers.running
        async with rpc.aio_channel(d.endpoint, RouterConfig(), RouterConfig()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request([5] * 20, LONG))
            await until(lambda: bool(d.machine.ledger.transfers))
            await until(lambda: not d.machine.ledger.transfers)
            await until(lambda: d.control.handlers.running == watchers)
            assert await _ends_with(call) is Reason.STAGE_DEADLINE


async def _ends_with(
    call: grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
) -> Reason | None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call:
            pass
    fault = rpc.read_error(raised.value)
    return fault.reason if isinstance(fault, Fault) else None
