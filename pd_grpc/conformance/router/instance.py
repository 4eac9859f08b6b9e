"""The kit as the P and the D behind a router: instances whose every answer a case gives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from pd_grpc.conformance.case import Broken, answer_s, within
from pd_grpc.conformance.router.incoming import IncomingCall
from pd_grpc.conformance.router.line import Line
from pd_grpc.conformance.sampling_values import FEATURES
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.config import ServerConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import mint_epoch
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    layout_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)

Context = grpc.aio.ServicerContext[Any, Any]
PrefillLeg = IncomingCall[prefill_pb2.PrefillRequest]
DecodeLeg = IncomingCall[inference_pb2.GenerateRequest]

MODEL = inference_pb2.GetModelInfoResponse(
    model="pd-grpc-conformance",
    tokenizer="pd-grpc-conformance",
    max_model_len=1_050_000,
    vocab_size=32_000,
    features=[*FEATURES],
    layout=layout_pb2.KvLayout(
        model="pd-grpc-conformance",
        positions="none",
        block_size=16,
        groups=[
            layout_pb2.KvGroup(
                kind=layout_pb2.KV_GROUP_KIND_FULL,
                layers=1,
                planes=[
                    layout_pb2.Plane(kind=kind, dtype="uint8", heads=1, head_dim=8)
                    for kind in (layout_pb2.PLANE_KIND_K, layout_pb2.PLANE_KIND_V)
                ],
            )
        ],
    ),
)
"""What the kit's instances say they serve: room for a prompt of a million tokens."""

_NAMES = {types_pb2.ROLE_PREFILL: "prefill", types_pb2.ROLE_DECODE: "decode"}


class _Following(Transcript):
    """Writes to the transcript of the case that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.to = Transcript()

    def sent(self, method: str, text: str) -> None:
        self.to.sent(method, text)

    def received(self, method: str, text: str) -> None:
        self.to.received(method, text)


class KitInstance(
    prefill_pb2_grpc.PrefillServiceServicer,
    inference_pb2_grpc.InferenceServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    """A P or a D of the kit's. The router's calls of its leg go into `calls`; `states` is what it
    tells of transfers, by their id."""

    def __init__(
        self, role: types_pb2.Role, name: str, endpoint: str, calls: asyncio.Queue[Any]
    ) -> None:
        self.instance = types_pb2.Instance(name=name, epoch=mint_epoch(SystemClock()), role=role)
        self.line = Line(endpoint)
        self.calls = calls
        self.legs: set[IncomingCall[Any]] = set()
        self.states: dict[str, types_pb2.TransferState] = {}
        self.transcript = _Following()
        config = ServerConfig(host="127.0.0.1", name=name)
        services = [f"pd_grpc.v1.{_NAMES[role].title()}Service", "pd_grpc.v1.InferenceService"]
        self.control = ControlServer(config, _NAMES[role], [*services, "pd_grpc.v1.AdminService"])
        server = self.transcript.server(self.control.server)
        if role == types_pb2.ROLE_PREFILL:
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)

    @property
    def name(self) -> str:
        """Name of the instance."""
        return str(self.instance.name)

    @property
    def endpoint(self) -> str:
        """Where the router calls it."""
        return self.line.endpoint

    async def start(self) -> None:
        """Serve, not ready yet. PortInUse."""
        await self.control.start()
        self.control.set_ready(False, "no case has begun")
        await self.line.open("127.0.0.1", self.control.port)

    async def stop(self) -> None:
        """End everything."""
        await self.line.cut()
        await self.control.stop(0)

    def restart(self) -> None:
        """Be another process of the same name from now on; the line is to be cut before."""
        self.instance.epoch = max(mint_epoch(SystemClock()), self.instance.epoch + 1)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        """P's leg."""
        await self._leg(request, context)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """D's leg."""
        if self.instance.role != types_pb2.ROLE_DECODE:
            await rpc.abort(context, Fault(Reason.FEATURE, "a P does not generate"))
        await self._leg(request, context)

    async def _leg(self, request: Any, context: Context) -> None:
        leg = IncomingCall(self.name, request, context.time_remaining())
        self.legs.add(leg)
        self.calls.put_nowait(leg)
        try:
            await leg.serve(context)
        finally:
            self.legs.discard(leg)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        """The kit's model."""
        return MODEL

    async def GetServerInfo(
        self, request: admin_pb2.GetServerInfoRequest, context: Context
    ) -> admin_pb2.GetServerInfoResponse:
        """Who it is."""
        ready = self.control.ready
        server = admin_pb2.ServerInfo(
            instance=self.instance,
            endpoint=self.endpoint,
            health=admin_pb2.HEALTH_SERVING if ready else admin_pb2.HEALTH_NOT_SERVING,
            model=MODEL.model,
        )
        return admin_pb2.GetServerInfoResponse(server=server)

    async def GetTransfer(
        self, request: admin_pb2.GetTransferRequest, context: Context
    ) -> admin_pb2.GetTransferResponse:
        """How a transfer stands, as the case has it."""
        state = self.states.get(request.transfer_id)
        if state is None:
            await rpc.abort(context, Fault(Reason.UNKNOWN_TRANSFER, "no such transfer"))
        ref = types_pb2.TransferRef(
            transfer_id=request.transfer_id,
            attempt=max(1, request.attempt),
            decode_epoch=self.instance.epoch,
        )
        return admin_pb2.GetTransferResponse(transfer=admin_pb2.TransferInfo(ref=ref, state=state))


class Instances:
    """The P, the D and, where there is one, the other D behind the router."""

    def __init__(self, as_prefill: str, as_decode: str, as_alternate: str = "") -> None:
        self.prefills: asyncio.Queue[PrefillLeg] = asyncio.Queue()
        self.generates: asyncio.Queue[DecodeLeg] = asyncio.Queue()
        decode = types_pb2.ROLE_DECODE
        self.p = KitInstance(types_pb2.ROLE_PREFILL, "kit-p", as_prefill, self.prefills)
        self.d = KitInstance(decode, "kit-d", as_decode, self.generates)
        self.alternate = (
            KitInstance(decode, "kit-d2", as_alternate, self.generates) if as_alternate else None
        )
        self.disturbed = False
        """Whether a case has changed which of them the router can use."""

    @property
    def all(self) -> list[KitInstance]:
        """Every one."""
        return [self.p, self.d, *([self.alternate] if self.alternate else [])]

    @property
    def endpoints(self) -> list[str]:
        """Theirs: P's first, then the Ds'."""
        return [instance.endpoint for instance in self.all]

    def follow(self, transcript: Transcript) -> None:
        """Write down what is said from now on there."""
        for instance in self.all:
            instance.transcript.to = transcript

    def set_ready(self, instance: KitInstance, ready: bool) -> None:
        """Say whether an instance takes requests."""
        self.disturbed = True
        instance.control.set_ready(ready, "" if ready else "a case wants it so")

    async def cut(self, instance: KitInstance) -> None:
        """Let an instance be gone."""
        self.disturbed = True
        await instance.line.cut()

    async def restore(self) -> None:
        """P and the first D up and ready, the other one up and not ready."""
        for instance in self.all:
            await instance.line.mend()
            instance.states.clear()
            instance.control.set_ready(instance is not self.alternate, "no case wants it")

    async def next_prefill(self, what: str = "Prefill called on the kit's P") -> PrefillLeg:
        """The next call of the router's to P."""
        return await within(None, self.prefills.get(), what)

    async def next_generate(self, what: str = "Generate called on a D of the kit's") -> DecodeLeg:
        """The next call of the router's to a D."""
        return await within(None, self.generates.get(), what)

    async def next_legs(self) -> tuple[PrefillLeg, DecodeLeg]:
        """The next call to P and the next to a D, whichever comes first."""
        return await self.prefills.get(), await self.generates.get()

    async def any_call(self) -> str:
        """Wait until a leg comes; says where."""
        queues: tuple[asyncio.Queue[Any], ...] = (self.prefills, self.generates)
        waiting = [asyncio.ensure_future(queue.get()) for queue in queues]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        return f"a leg opened on {done.pop().result().instance}"

    async def quiet(self) -> None:
        """Broken unless every leg has ended in time; forgets those that no case has taken."""
        for instance in self.all:
            for leg in list(instance.legs):
                await leg.over(f"the leg on {instance.name} ended with its request", answer_s())
        self.forget()

    def forget(self) -> None:
        """Drop the calls that no case has taken."""
        for queue in (self.prefills, self.generates):
            while not queue.empty():
                queue.get_nowait()

    def expect_no_call(self, why: str) -> None:
        """Broken when a leg was opened that no case has taken."""
        for queue in (self.prefills, self.generates):
            if not queue.empty():
                leg = queue.get_nowait()
                raise Broken(f"expected no leg opened: {why}; one came to {leg.instance}")


@contextlib.asynccontextmanager
async def open_instances(
    as_prefill: str, as_decode: str, as_alternate: str = ""
) -> AsyncIterator[Instances]:
    """Listen as P and D at these endpoints, host:port; port 0 takes a free one. PortInUse."""
    instances = Instances(as_prefill, as_decode, as_alternate)
    started: list[KitInstance] = []
    try:
        for instance in instances.all:
            started.append(instance)
            await instance.start()
        await instances.restore()
        yield instances
    finally:
        for instance in started:
            await instance.stop()
