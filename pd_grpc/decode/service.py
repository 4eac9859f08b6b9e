"""D on the wire: handlers that translate, and hold no rule."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import grpc.aio
from google.protobuf.message import DecodeError

from pd_grpc.decode import events as ev
from pd_grpc.decode.outbox import SessionOutbox, TokenOutbox
from pd_grpc.decode.runtime import DecodeRuntime
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import SILENT_HEARTBEATS, Timeouts
from pd_grpc.protocol.failures import called_directly
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.messages import duration, seconds
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event
from pd_grpc.telemetry.tracing import current_context
from pd_grpc.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """What P calls."""

    def __init__(self, runtime: DecodeRuntime, timeouts: Timeouts) -> None:
        self._runtime = runtime
        self._timeouts = timeouts

    async def Session(self, request_iterator: Any, context: Context) -> None:
        try:
            first = await anext(aiter(request_iterator), None)
        except DecodeError:
            await rpc.abort(context, _garbage())
        if first is None:
            return
        if first.WhichOneof("message") != "hello":
            await rpc.abort(context, _out_of_order("hello must come first"))
        stream, outbox = self._runtime.open_session(first.hello)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        reader.add_done_callback(lambda done: _end_with(done, outbox, self._runtime.log))
        fault: Fault | None = None
        try:
            await self._write(outbox, context)
        except Fault as ended_with:
            fault = ended_with
        finally:
            reader.cancel()
            self._runtime.close_session(stream)
        if fault is not None:
            await rpc.abort(context, fault)

    async def _write(self, outbox: SessionOutbox, context: Context) -> None:
        """Until the session is over. A P that does not read for two heartbeats is as good as one
        that sends none."""
        patience_s = SILENT_HEARTBEATS * self._timeouts.heartbeat_s
        while (message := await outbox.next()) is not None:
            try:
                await asyncio.wait_for(rpc.write(context, message), patience_s)
            except asyncio.TimeoutError:
                text = f"this prefill read nothing for {patience_s:g} s"
                raise Fault(Reason.LEASE_EXPIRED, text) from None

    async def _read(self, stream: int, requests: Any) -> None:
        message: decode_pb2.SessionRequest
        try:
            async for message in requests:
                kind = message.WhichOneof("message")
                if kind == "heartbeat":
                    self._runtime.feed(ev.HeartbeatReceived(stream, message.heartbeat))
                elif kind == "goodbye":
                    self._runtime.feed(ev.GoodbyeReceived(stream))
                elif kind == "hello":
                    raise _out_of_order("hello came twice")
        except DecodeError:
            raise _garbage() from None

    async def Allocate(
        self, request: decode_pb2.AllocateRequest, context: Context
    ) -> decode_pb2.AllocateResponse:
        # Held to the end, and with it the request's grammar.
        looked = await self._runtime.grammar_check.look(request.sampling)
        self._shrink_wait(request, context)
        try:
            return await self._runtime.call_allocate(request, current_context(), looked.fault)
        except Fault as fault:
            await rpc.abort(context, fault)

    async def SendFirstToken(
        self, request: decode_pb2.SendFirstTokenRequest, context: Context
    ) -> decode_pb2.SendFirstTokenResponse:
        try:
            return await self._runtime.call_first_token(request)
        except Fault as fault:
            await rpc.abort(context, fault)

    async def Release(
        self, request: decode_pb2.ReleaseRequest, context: Context
    ) -> decode_pb2.ReleaseResponse:
        try:
            return await self._runtime.call_release(request)
        except Fault as fault:
            await rpc.abort(context, fault)

    def _shrink_wait(self, request: decode_pb2.AllocateRequest, context: Context) -> None:
        """Answer before the caller's own timer fires, whatever wait it asks for."""
        left = rpc.time_left(context)
        if left is None:
            return
        wait = min(seconds(request.max_wait), left - self._timeouts.hop_margin_s)
        request.max_wait.CopyFrom(duration(wait))


class DecodeInference(inference_pb2_grpc.InferenceServiceServicer):
    """What clients call on D."""

    whole_answers: ClassVar[bool] = False
    """Whether an answer goes in one message, when it is complete, for those who start a D whose
    clients show nothing before."""

    def __init__(
        self,
        runtime: DecodeRuntime,
        timeouts: Timeouts,
        model_info: inference_pb2.GetModelInfoResponse,
    ) -> None:
        self._runtime = runtime
        self._timeouts = timeouts
        self._model_info = model_info

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        parent = current_context()
        direct = called_directly(context.invocation_metadata())
        # Held to the end, and with it the request's grammar.
        looked = await self._runtime.grammar_check.look(
            request.sampling, request.generated_token_ids
        )
        budget_s = rpc.budget_of(context, self._timeouts)
        call, outbox = self._runtime.open_generate(request, budget_s, parent, direct, looked.fault)
        if self.whole_answers:
            outbox.keep_whole()
        try:
            # The machine answers within the budget; what follows is for the reader to take it.
            writing = self._write_all(call, outbox, context)
            await rpc.write_within(writing, budget_s + rpc.STATUS_READ_S)
        except Fault as fault:
            await rpc.abort(context, fault)
        finally:
            self._runtime.close_generate(call)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        return self._model_info

    async def _write_all(self, call: int, outbox: TokenOutbox, context: Context) -> None:
        while (message := await outbox.next()) is not None:
            await rpc.write(context, message)
            self._runtime.wrote(call, len(message.token_ids))


def _garbage() -> Fault:
    return bad_request([FieldError("message", "is no protobuf")])


def _out_of_order(text: str) -> Fault:
    return Fault(Reason.WRONG_STATE, text, {"state": "session"})


def _end_with(reader: asyncio.Task[None], outbox: SessionOutbox, log: InstanceLog) -> None:
    """Whatever ends the reading ends the session."""
    if reader.cancelled():
        return
    error = reader.exception()
    if error is None or isinstance(error, Fault):
        outbox.end(error)
        return
    log.note(Event.DEFECT, "reading a session failed", error=error)
    outbox.end(Fault(Reason.ENGINE_ERROR, f"reading the session failed: {type(error).__name__}"))
