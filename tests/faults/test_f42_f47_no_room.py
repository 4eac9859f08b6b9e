"""F42, F47: a D without room says so and serves everybody else; each way to fail has one code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.engine.base import DecodeSlot, EngineFault, Sampled
from pd_grpc.engine.sim import SimEngine
from pd_grpc.prefill.decode_faults import another_may_do, has_no_room
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import MIB
from pd_grpc.protocol.faults import Code, Fault, Quota, Reason, TransportFault, transport_fault
from pd_grpc.v1 import admin_pb2, decode_pb2
from tests.decode.messages import Request
from tests.decode.wire import CALL_S, GatedEngine, RawPrefill, Wire, fault_of, tokens_of, wire
from tests.waiting import until

REFUSED = 60


async def test_a_full_pool_refuses_with_a_time_to_come_back_and_serves_the_others() -> None:
    """F42: refusals cost the pool nothing, and neither calls nor sessions wait for its blocks."""
    async with wire(GatedEngine) as d:
        p, pool, engine = await d.prefill(), d.server.pool, d.server.engine
        assert isinstance(engine, GatedEngine)
        engine.gate.clear()
        decoding = d.request(max_tokens=2)
        decoded = asyncio.create_task(tokens_of(d.generate(decoding, local=True)))
        await asyncio.to_thread(engine.entered.wait, CALL_S)
        taken = pool.reserve(pool.free, owner="the test")
        queued = [d.request() for _ in range(4)]
        waiting = [asyncio.ensure_future(_granted(p.allocate(request))) for request in queued]
        await d.until_state(queued[-1], "WAITING")
        refused = [fault_of(p.allocate(d.request(), max_wait_s=0.0)) for _ in range(REFUSED)]
        for fault in await asyncio.gather(*refused):
            assert (fault.code, fault.reason) == (Code.RESOURCE_EXHAUSTED, Reason.NO_BLOCKS)
            assert (fault.quota, fault.retry_after_s) == (Quota(needed=2, free=0), 0.25)
        info = await d.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=CALL_S)
        assert info.server.instance == d.server.instance
        beat = decode_pb2.Heartbeat(sequence=1)
        await p.session.write(decode_pb2.SessionRequest(heartbeat=beat))
        await until(lambda: any(m.HasField("heartbeat_ack") for m in p.heard))
        alone = d.request(max_tokens=1)
        call = d.generate(alone)
        grant = await p.allocate(alone, kv_needed=False)
        await p.first_token(alone, grant.grant_id, d.answer(alone)[0], finish=2)
        assert await tokens_of(call) == d.answer(alone)
        engine.gate.set()
        assert await decoded == d.answer(decoding)
        taken.release()
        d.server.runtime.wake()
        assert all(await asyncio.gather(*waiting))
        for request in queued:
            await p.release(request)


async def _granted(call: Any) -> str:
    return str((await call).grant_id)


class OutOfMemory(SimEngine):
    """Fails in a step, in the words of an allocator."""

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Sampled]:
        raise EngineFault("out of memory: cannot allocate a buffer for the step")


async def _wait_is_over(d: Wire, p: RawPrefill, request: Request) -> Fault:
    return await fault_of(p.allocate(request, max_wait_s=0.2))


async def _time_is_over(d: Wire, p: RawPrefill, request: Request) -> Fault:
    fault = await fault_of(p.allocate(request, budget_s=0.2, max_wait_s=0.2))
    assert fault.metadata["stage"] == "allocate"
    return fault


async def _clients_time_is_over(d: Wire, p: RawPrefill, request: Request) -> Fault:
    call = d.generate(request, timeout_s=3.0)
    waiting = p.allocate(request)
    fault = await fault_of(call)
    assert fault.metadata["stage"] == "allocate"
    await fault_of(waiting)
    return fault


async def _queue_is_full(d: Wire, p: RawPrefill, request: Request) -> Fault:
    waiting = p.allocate(d.request())
    await until(lambda: len(d.server.machine.ledger.transfers) == 1)
    fault = await fault_of(p.allocate(request))
    waiting.cancel()
    return fault


async def _could_never_fit(d: Wire, p: RawPrefill, request: Request) -> Fault:
    return await fault_of(p.allocate(d.request(prompt=[1] * 200)))


@pytest.mark.parametrize(
    ("happens", "code", "reason"),
    [
        (_wait_is_over, Code.RESOURCE_EXHAUSTED, Reason.NO_BLOCKS),
        (_time_is_over, Code.DEADLINE_EXCEEDED, Reason.STAGE_DEADLINE),
        (_clients_time_is_over, Code.DEADLINE_EXCEEDED, Reason.STAGE_DEADLINE),
        (_queue_is_full, Code.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL),
        (_could_never_fit, Code.INVALID_ARGUMENT, Reason.TOO_LARGE),
    ],
)
async def test_what_fails_on_a_full_d_says_what_it_is(
    happens: Callable[[Wire, RawPrefill, Request], Awaitable[Fault]], code: Code, reason: Reason
) -> None:
    """F47: time that is over is not memory that is out, nor the other way round."""
    async with wire(allocate_queue=1, hop_margin_s=1.0) as d:
        p = await d.prefill()
        taken = d.server.pool.reserve(d.server.pool.free, owner="the test")
        fault = await happens(d, p, d.request())
        assert (fault.code, fault.reason) == (code, reason)
        taken.release()


async def test_no_client_and_no_first_token_are_two_deadlines() -> None:
    """F47: which of the two was missed is in the reason."""
    async with wire(attach_s=0.3, first_token_s=0.3) as d:
        p = await d.prefill()
        alone, mute = d.request(), d.request()
        await p.hand_over(alone)
        call = d.generate(mute)
        grant = await p.allocate(mute)
        _, chunks = p.compute(mute)
        await p.send_kv(mute, grant, chunks)
        missed = await fault_of(call)
        assert (missed.reason, missed.metadata) == (
            Reason.STAGE_DEADLINE,
            {"stage": "first_token"},
        )
        await until(lambda: not d.server.machine.ledger.transfers)
        absent = await fault_of(d.generate(alone))
        assert (absent.code, absent.reason) == (Code.DEADLINE_EXCEEDED, Reason.CLIENT_ABSENT)


async def test_an_engine_without_memory_is_no_pool_without_blocks() -> None:
    """F47: nobody is asked to come back later for what would fail again."""
    async with wire(OutOfMemory) as d:
        fault = await fault_of(d.generate(d.request(), local=True))
        assert (fault.code, fault.reason) == (Code.INTERNAL, Reason.ENGINE_ERROR)
        assert "out of memory" in fault.message and fault.retry_after_s is None


async def test_a_message_too_large_is_no_pool_without_blocks() -> None:
    """F47: the transport's own RESOURCE_EXHAUSTED never reads as NO_BLOCKS."""
    async with wire(max_message_bytes=MIB) as d:
        p = await d.prefill()
        large = p.allocate(d.request(request_id="x" * (2 * MIB)))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await large
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = rpc.read_error(raised.value)
        assert isinstance(error, TransportFault)
        assert not another_may_do(error) and not has_no_room(error)
        meant = transport_fault(error, "d", Reason.DECODE_LOST, "allocate")
        assert meant.reason is Reason.TOO_LARGE
