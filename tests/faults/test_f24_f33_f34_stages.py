"""F24, F33, F34: whatever ends a request, at whatever stage, its client hears why, P stops by the
next chunk, and every block comes back.

Cancel, disconnect and deadline, each met at every stage. A stage is held open by what it waits for:
a D whose pool is taken, a P that computes slowly, a D that decodes slowly.
`cluster` checks at its end that every block is free and no transfer is left anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.cluster import Cluster, cluster
from tests.system.asking import request
from tests.waiting import until

pytestmark = pytest.mark.longest

LONG = list(range(3, 1603))
SLOW = Sampling(max_tokens=3000, temperature=0.0, ignore_eos=True)
STAGES = ("allocate", "compute", "decode")
# Compute takes some 6 s at a scale of 40, a token 50 ms at a scale of 10.
SCALES = {"allocate": 1.0, "compute": 40.0, "decode": 10.0}
LIMITS_S = {"allocate": 3.0, "compute": 4.0, "decode": 7.0}
MARGIN: dict[str, Any] = {"hop_margin_s": 1.0}
"""By so much our answer comes before the caller's own timer, which a busy machine may need."""
# P and D count the same time and either may be first: what P computes, D waits to be transferred.
TOLD = {
    "allocate": {"allocate"},
    "compute": {"compute", "transfer"},
    "decode": {"decode"},
}
REACHED = {
    "allocate": {types_pb2.TRANSFER_STATE_WAITING, types_pb2.TRANSFER_STATE_ALLOCATING},
    "compute": {types_pb2.TRANSFER_STATE_COMPUTING},
    "decode": {types_pb2.TRANSFER_STATE_DECODING},
}


@contextlib.asynccontextmanager
async def at_stage(stage: str) -> AsyncIterator[tuple[Cluster, Callable[[], Awaitable[None]]]]:
    """A cluster in which a request gets as far as `stage` and stays there a while, and a wait for
    the request to be there."""
    scale = SCALES[stage]
    async with cluster(
        sim_time_scale=scale, num_blocks=320, router_settings=MARGIN, **MARGIN
    ) as running:
        pool = running.decodes[0].pool
        taken = pool.reserve(pool.total, owner="the test") if stage == "allocate" else None
        yield running, lambda: until(lambda: states(running) >= REACHED[stage])
        if taken is not None:
            taken.release()


def states(running: Cluster) -> set[int]:
    """The states of all that P and D hold."""
    d, p = running.decodes[0], running.prefills[0]
    return {info.state for info in d.view.transfers() + p.view.transfers()}


Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


def _generate(channel: grpc.aio.Channel, timeout_s: float) -> Call:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call: Call = stub.Generate(request(LONG, SLOW), timeout=timeout_s)
    return call


async def _read_to_end(call: Call) -> None:
    async for _ in call:
        pass


async def _ended(running: Cluster) -> None:
    """Nobody holds the request any more, though it has minutes left."""
    await until(lambda: not states(running))


@pytest.mark.parametrize("stage", STAGES)
async def test_a_cancelled_request_ends_everywhere(stage: str) -> None:
    async with (
        at_stage(stage) as (running, there),
        rpc.aio_channel(running.router.endpoint, RouterConfig(), RouterConfig()) as channel,
    ):
        call = _generate(channel, 300)
        reading = asyncio.create_task(_read_to_end(call))
        await there()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await _ended(running)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_whose_connection_closes_frees_its_request(stage: str) -> None:
    async with at_stage(stage) as (running, there):
        channel = rpc.aio_channel(running.router.endpoint, RouterConfig(), RouterConfig())
        reading = asyncio.create_task(_read_to_end(_generate(channel, 300)))
        await there()
        await channel.close(None)
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await reading
        await _ended(running)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_deadline_is_told_with_the_stage_that_spent_it(stage: str) -> None:
    limit_s = LIMITS_S[stage]
    async with (
        at_stage(stage) as (running, there),
        rpc.aio_channel(running.router.endpoint, RouterConfig(), RouterConfig()) as channel,
    ):
        reading = asyncio.create_task(_read_to_end(_generate(channel, limit_s)))
        await there()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reading
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault), "our answer came before the caller's own timer"
        assert (fault.code, fault.reason) == (Code.DEADLINE_EXCEEDED, Reason.STAGE_DEADLINE)
        assert fault.metadata["stage"] in TOLD[stage]
        await _ended(running)
