"""Each link of a cluster goes silent or closes in the middle of a request, under heavy writes too.

Both of its ends know: of one that closed within a second, of a silent one within two heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from pd_grpc.decode.server import DecodeServer, start_decode
from pd_grpc.decode.states import DecodeState
from pd_grpc.engine.sim import SimEngine
from pd_grpc.prefill.server import PrefillServer, start_prefill
from pd_grpc.prefill.sessions import Phase
from pd_grpc.prefill.states import Stream
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, RouterConfig, Sizes, Timeouts
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.v1 import (
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
)
from tests.faults.silent_line import SilentLine, silent_line
from tests.prefill.cluster import Request
from tests.system.asking import ask, request
from tests.waiting import LIMIT_S, until

HEARTBEAT_S = 0.8
BEATS = Timeouts(heartbeat_s=HEARTBEAT_S)
# Some 16 KiB of KV for each token, so that a prompt is more than any buffer holds.
LARGE_KV: dict[str, Any] = {"sim_layers": 8, "sim_heads": 16, "sim_head_dim": 64}
SIM: dict[str, Any] = {
    "engine": "sim",
    "num_blocks": 256,
    "chunk_tokens": 128,
    "heartbeat_s": HEARTBEAT_S,
    "lease_s": 60.0,
    "grace_s": 0.3,
    "max_model_len": 4000,
    **LARGE_KV,
}
PROMPT = list(range(3, 1603))
LONG = Sampling(max_tokens=2000, temperature=0.0, ignore_eos=True)


async def _silent(line: SilentLine) -> float:
    line.fall_silent()
    return 2 * HEARTBEAT_S


async def _closed(line: SilentLine) -> float:
    await line.close()
    return 1.0


Fault = Callable[[SilentLine], Awaitable[float]]
"""Does something to a line, and says within how many seconds both of its ends must know."""

either = pytest.mark.parametrize("fault", [_silent, _closed])
LATE_S = 20.0
"""For a machine that is busy with other tests."""


@dataclass
class Site:
    """One of each role, with a line on every way from one to another."""

    p: PrefillServer
    d: DecodeServer
    router: RouterServer
    to_router: SilentLine
    to_p: SilentLine
    to_d: SilentLine
    p_to_d: SilentLine
    to_shard: SilentLine

    def decoding(self) -> bool:
        live = self.d.machine.ledger.transfers.values()
        return any(transfer.state is DecodeState.DECODING for transfer in live)

    def computing(self) -> bool:
        return any(record.computed for record in self.p.machine.requests.in_flight.values())

    def streams(self) -> list[Stream]:
        """Those of P that are open."""
        flying = self.p.machine.requests.in_flight.values()
        return [s for record in flying for s in record.streams.values() if s is Stream.OPEN]

    async def routed(self, stub: inference_pb2_grpc.InferenceServiceStub) -> str:
        """A long request through the router; why it failed."""
        try:
            await ask(stub, request(PROMPT, LONG))
        except grpc.aio.AioRpcError as error:
            return str(rpc.read_error(error))
        raise AssertionError("it was answered")

    async def under_way(
        self, stub: inference_pb2_grpc.InferenceServiceStub, there: Callable[[], bool]
    ) -> asyncio.Task[str]:
        """A long request through the router that is `there`. One that failed before is asked again:
        a machine that stands still for two heartbeats is a silent link too."""
        while True:
            await until(lambda: self.router.ready)
            asked = asyncio.create_task(self.routed(stub))
            await until(lambda asked=asked: there() or asked.done())  # type: ignore[misc]
            if not asked.done():
                return asked
            await asked

    @contextlib.asynccontextmanager
    async def handing_over(self) -> AsyncIterator[None]:
        """A long request straight to P and D, while the block lasts."""
        target = prefill_pb2.DecodeTarget(endpoint=self.p_to_d.endpoint)
        sampling = sampling_pb2.SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        asked = Request(PROMPT, sampling, [target])
        async with (
            rpc.aio_channel(self.p.endpoint, BEATS, Sizes()) as to_p,
            rpc.aio_channel(self.d.endpoint, BEATS, Sizes()) as to_d,
        ):
            generate = inference_pb2_grpc.InferenceServiceStub(to_d).Generate(asked.generate())
            prefill = prefill_pb2_grpc.PrefillServiceStub(to_p).Prefill(asked.prefill())
            try:
                yield
            finally:
                prefill.cancel()
                generate.cancel()
                await until(lambda: not self.p.machine.requests.in_flight)


@contextlib.asynccontextmanager
async def site(prefill_scale: float, decode_scale: float) -> AsyncIterator[Site]:
    """A running site; at the end every block must be back."""
    async with contextlib.AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(silent_line()) for _ in range(5)]
        to_router, to_p, to_d, p_to_d, to_shard = lines
        dconfig = DecodeConfig(
            transports=("inline",),  # bytes on the line are what these tests cut
            **SIM,
            name="d",
            sim_time_scale=decode_scale,
            bulk_advertise=to_shard.endpoint,
        )
        d = await start_decode(dconfig, SimEngine(dconfig))
        stack.push_async_callback(d.stop)
        pconfig = PrefillConfig(**SIM, name="p", sim_time_scale=prefill_scale)
        p = await start_prefill(pconfig, SimEngine(pconfig))
        stack.push_async_callback(p.stop)
        rconfig = RouterConfig(
            engine="sim",
            heartbeat_s=HEARTBEAT_S,
            prefill=(to_p.endpoint,),
            decode=(to_d.endpoint,),
            retry=False,
            continuation=False,
        )
        to_p.lead_to(p.endpoint)
        to_shard.lead_to(f"127.0.0.1:{d.bulk.port}")
        for line in (to_d, p_to_d):
            line.lead_to(d.endpoint)
        router = await start_router(rconfig, p.engine.tokenizer())
        stack.push_async_callback(router.stop)
        to_router.lead_to(router.endpoint)
        await until(lambda: router.ready)
        yield Site(p, d, router, *lines)
        for line in lines:
            line.speak()
        for pool in (p.pool, d.pool):
            await until(lambda pool=pool: pool.free == pool.total)  # type: ignore[misc]
            pool.check()


async def _known(limit_s: float, *ends: Callable[[], bool]) -> None:
    """Each end knows within the limit."""
    await asyncio.gather(*(until(end, limit_s + LATE_S) for end in ends))


@either
async def test_client_and_router(fault: Fault) -> None:
    async with site(0.0, 10.0) as here:
        async with rpc.aio_channel(here.to_router.endpoint, BEATS, Sizes()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            client = await here.under_way(stub, here.decoding)
            limit_s = await fault(here.to_router)
            await _known(limit_s, client.done, lambda: not here.router.in_flight.running())
        await until(lambda: not here.d.machine.ledger.transfers)


@either
async def test_router_and_p(fault: Fault) -> None:
    async with (
        site(40.0, 0.0) as here,
        rpc.aio_channel(here.router.endpoint, BEATS, Sizes()) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        client = await here.under_way(stub, here.computing)
        limit_s = await fault(here.to_p)
        flying = here.p.machine.requests.in_flight
        await _known(limit_s, lambda: not here.router.ready, lambda: not flying)
        assert "PREFILL_LOST" in await asyncio.wait_for(client, LIMIT_S)


@either
async def test_router_and_d(fault: Fault) -> None:
    async with (
        site(0.0, 10.0) as here,
        rpc.aio_channel(here.router.endpoint, BEATS, Sizes()) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        client = await here.under_way(stub, here.decoding)
        limit_s = await fault(here.to_d)
        live = here.d.machine.ledger.transfers
        await _known(limit_s, client.done, lambda: not here.router.ready, lambda: not live)
        assert "DECODE_LOST" in client.result()


@either
async def test_p_and_the_control_of_d(fault: Fault) -> None:
    async with site(40.0, 0.0) as here, here.handing_over():
        await until(here.computing)
        sessions, conversations = here.d.machine.ledger.sessions, here.p.machine.conversations
        limit_s = await fault(here.p_to_d)
        await _known(
            limit_s,
            lambda: not sessions.live(),
            lambda: all(session.phase is not Phase.OPEN for session in conversations.all()),
        )
        # Then both sides hold nothing after the grace.
        await until(lambda: not here.d.machine.ledger.transfers)
        await until(lambda: not here.p.machine.requests.in_flight)


@either
async def test_p_and_the_shard_of_d_under_heavy_writes(fault: Fault) -> None:
    async with site(1.0, 0.0) as here, here.handing_over():
        await until(lambda: here.to_shard.passed > 3_000_000)
        limit_s = await fault(here.to_shard)
        await _known(limit_s, lambda: not here.streams(), lambda: not here.d.bulk._outboxes)
