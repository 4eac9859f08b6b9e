"""Clients that leave or run out of time, at each stage, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.protocol.faults import Code, Fault, Reason, read_status
from pd_grpc.v1 import (
    inference_pb2_grpc,
    transfer_pb2,
)
from tests.decode.messages import Request
from tests.decode.wire import CALL_S, GatedEngine, RawPrefill, Wire, fault_of, wire
from tests.waiting import until

STAGES = ["EXPECTED", "WAITING", "RESERVED", "RECEIVING", "READY", "DECODING"]


class Stage:
    """A request brought to a stage, with all that must be let go of afterwards."""

    def __init__(self, d: Wire, p: RawPrefill) -> None:
        self.d = d
        self.p = p
        self.request = d.request(prompt=list(range(100, 150)), max_tokens=30)
        self.blocker: Request | None = None
        self.allocate: Any = None
        self.transfer: Any = None

    async def reach(self, stage: str) -> None:
        d, p, request = self.d, self.p, self.request
        await d.until_state(request, "EXPECTED")
        if stage == "EXPECTED":
            return
        if stage == "WAITING":
            self.blocker = d.request(prompt=list(range(200, 250)))
            await p.allocate(self.blocker)
            self.allocate = p.allocate(request)
            await d.until_state(request, stage)
            return
        grant = await p.allocate(request)
        token, chunks = p.compute(request)
        if stage == "RECEIVING":
            self.transfer = await p.open(request, grant)
            await self.transfer.read()
            chunk = chunks[0]
            await self.transfer.write(transfer_pb2.TransferRequest(chunk=chunk))
            await self.transfer.read()
        elif stage != "RESERVED":
            await p.send_kv(request, grant, chunks)
        if stage == "DECODING":
            await p.first_token(request, grant.grant_id, token)
        await d.until_state(request, stage)

    async def let_go(self) -> None:
        if self.blocker is not None:
            await self.p.release(self.blocker)


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_frees_both_sides(stage: str, how: str) -> None:
    """F24, F33, F52."""
    async with wire(GatedEngine) as d:
        engine = d.server.engine
        assert isinstance(engine, GatedEngine)
        engine.gate.clear()
        p = await d.prefill()
        at = Stage(d, p)
        channel = grpc.aio.insecure_channel(d.server.endpoint)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(at.request.generate(), timeout=CALL_S)
        reading = asyncio.create_task(drained(call))
        await at.reach(stage)
        if how == "cancel":
            call.cancel()
        await channel.close(None)
        await reading
        if stage == "WAITING":
            assert (await fault_of(at.allocate)).reason is Reason.CLIENT_GONE
        elif stage in ("RESERVED", "RECEIVING", "READY"):
            fault = read_status((await p.told_of(at.request)).status)
            assert isinstance(fault, Fault) and fault.reason is Reason.CLIENT_GONE
        if stage == "RECEIVING":
            assert (await fault_of(at.transfer)).reason is Reason.CLIENT_GONE
        await until(lambda: d.server.machine.find(at.request.transfer_id, 0) is None)
        engine.gate.set()
        await at.let_go()


async def drained(call: Any) -> None:
    try:
        async for _ in call:
            pass
    except (grpc.RpcError, asyncio.CancelledError):
        pass


@pytest.mark.parametrize("stage", STAGES)
async def test_a_deadline_is_answered_in_time_and_names_the_stage(stage: str) -> None:
    """F46: our details come before the client's own timer fires."""
    async with wire(GatedEngine, hop_margin_s=0.3) as d:
        engine = d.server.engine
        assert isinstance(engine, GatedEngine)
        engine.gate.clear()
        p = await d.prefill()
        at = Stage(d, p)
        call = d.generate(at.request, timeout_s=1.5)
        failed = asyncio.create_task(fault_of(call))
        await at.reach(stage)
        fault = await failed
        assert fault.reason is Reason.STAGE_DEADLINE and fault.code is Code.DEADLINE_EXCEEDED
        names = {"EXPECTED": "prefill", "WAITING": "allocate", "READY": "first_token"}
        expected = names.get(stage, "decode" if stage == "DECODING" else "transfer")
        assert fault.metadata == {"stage": expected}
        if at.allocate is not None:
            assert (await fault_of(at.allocate)).reason is Reason.STAGE_DEADLINE
        engine.gate.set()
        await at.let_go()
