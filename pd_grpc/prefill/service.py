"""P on the wire: handlers that translate, and hold no rule."""

from __future__ import annotations

from typing import Any

import grpc.aio

from pd_grpc.prefill.runtime import PrefillRuntime
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Timeouts
from pd_grpc.protocol.failures import called_directly
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.telemetry.tracing import current_context
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """What routers and clients call."""

    def __init__(self, runtime: PrefillRuntime, timeouts: Timeouts) -> None:
        self._runtime = runtime
        self._timeouts = timeouts

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        direct = called_directly(context.invocation_metadata())
        parent = current_context()
        # Held to the end, and with it the request's grammar.
        looked = await self._runtime.grammar_check.look(
            request.sampling, request.generated_token_ids
        )
        budget_s = rpc.budget_of(context, self._timeouts)
        call, outbox = self._runtime.open_call(request, budget_s, parent, direct, looked.fault)
        try:
            while (message := await outbox.next()) is not None:
                await rpc.write(context, message)
        except Fault as fault:
            await rpc.abort(context, fault)
        finally:
            self._runtime.close_call(call)


class PrefillInference(inference_pb2_grpc.InferenceServiceServicer):
    """What is served here. P generates no answers."""

    def __init__(self, model_info: inference_pb2.GetModelInfoResponse) -> None:
        self._model_info = model_info

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        text = "a prefill instance generates no answers; call a router or a decode instance"
        await rpc.abort(context, Fault(Reason.FEATURE, text, {"feature": "Generate"}))

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        return self._model_info
