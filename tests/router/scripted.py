"""Prefill and decode instances whose every answer a test writes, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from pd_grpc.conformance.sampling_values import FEATURES
from pd_grpc.protocol import rpc
from pd_grpc.protocol.admin import AdminService, ChangeFeed
from pd_grpc.protocol.config import ServerConfig
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)

Script = Callable[[Any], AsyncIterator[Any]]


class Scripted(
    prefill_pb2_grpc.PrefillServiceServicer, inference_pb2_grpc.InferenceServiceServicer
):
    """An instance of either role. `script` answers its calls: it yields messages or raises a Fault.

    `requests` holds what came, `metadata` the metadata it came with; `came` is set by a
    call, `left` when a caller has cancelled. `states` is what GetTransfer says.
    """

    def __init__(self, role: types_pb2.Role, name: str, port: int = 0) -> None:
        self.role_name = types_pb2.Role.Name(role).removeprefix("ROLE_").lower()
        service = f"pd_grpc.v1.{self.role_name.title()}Service"
        self.control = ControlServer(ServerConfig(name=name, port=port), self.role_name, [service])
        server = self.control.server
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(self, ChangeFeed()), server)
        self.instance = types_pb2.Instance(name=name, epoch=7, role=role)
        self.model = inference_pb2.GetModelInfoResponse(
            model="scripted", max_model_len=1000, vocab_size=32000, features=[*FEATURES]
        )
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.time_left: list[float] = []
        self.states: dict[str, types_pb2.TransferState] = {}
        self.came, self.left = asyncio.Event(), asyncio.Event()
        self.script: Script = _nothing

    @property
    def endpoint(self) -> str:
        return self.control.endpoint

    async def start(self, ready: bool = True) -> None:
        await self.control.start()
        self.control.set_ready(ready)

    async def stop(self) -> None:
        await self.control.stop(0)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> None:
        await self._play(request, context)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        await self._play(request, context)

    async def GetModelInfo(self, request: Any, context: Any) -> inference_pb2.GetModelInfoResponse:
        return self.model

    async def _play(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.came.set()
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_left.append(context.time_remaining())
        try:
            async for message in self.script(request):
                await context.write(message)
        except Fault as fault:
            await rpc.abort(context, fault)
        except asyncio.CancelledError:
            self.left.set()
            raise

    # What AdminService asks.

    def server_info(self) -> admin_pb2.ServerInfo:
        return admin_pb2.ServerInfo(
            instance=self.instance, endpoint=self.endpoint, health=admin_pb2.HEALTH_SERVING
        )

    async def peer_infos(self) -> list[admin_pb2.ServerInfo]:
        return []

    def spans(self, wanted: str) -> list[admin_pb2.Span]:
        return []

    async def peer_spans(self, trace_id: str) -> list[admin_pb2.Span]:
        return []

    def transfers(self) -> list[admin_pb2.TransferInfo]:
        return []

    def transfer(self, transfer_id: str, attempt: int) -> admin_pb2.TransferInfo | None:
        if (state := self.states.get("*")) is None:
            return None
        ref = types_pb2.TransferRef(transfer_id=transfer_id, attempt=attempt)
        return admin_pb2.TransferInfo(ref=ref, state=state)

    def release(self, transfer_id: str, attempt: int, reason: str) -> None:
        return None

    def drain(self, deadline_s: float | None) -> int:
        return 0


async def _nothing(request: Any) -> AsyncIterator[Any]:
    return
    yield


def tokens(*ids: int) -> inference_pb2.GenerateResponse:
    """A message of D in mid-answer."""
    return inference_pb2.GenerateResponse(token_ids=ids)


def last(
    *ids: int, reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_LENGTH
) -> inference_pb2.GenerateResponse:
    """D's last message."""
    usage = types_pb2.Usage(prompt_tokens=3, completion_tokens=9)
    return inference_pb2.GenerateResponse(
        token_ids=ids, finish_reason=reason, usage=usage, decode_instance="from-d"
    )


def handed_off(**timings: float) -> prefill_pb2.PrefillResponse:
    """P's last message, with its timings in milliseconds."""
    message = prefill_pb2.PrefillResponse()
    message.handed_off.decode.name = "d1"
    for name, millis in timings.items():
        getattr(message.handed_off.timings, name).FromMilliseconds(int(millis))
    return message


def placing(decode: Scripted) -> prefill_pb2.PrefillResponse:
    """P turns to another D."""
    message = prefill_pb2.PrefillResponse()
    message.placing.decode.name = decode.control.name
    message.placing.decode.endpoint = decode.endpoint
    return message


def refusing(fault: Fault) -> Script:
    """Answers with a fault alone."""

    async def script(request: Any) -> AsyncIterator[Any]:
        for message in tuple[Any, ...]():
            yield message
        raise fault

    return script


async def never() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()
