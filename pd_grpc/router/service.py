"""InferenceService of the router: between a client's call and a routed request.

Seam: an OpenAI-compatible front calls `RouterService.route` with a GenerateRequest of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import grpc.aio
from opentelemetry.context import Context
from opentelemetry.trace import Span

from pd_grpc.protocol import rpc
from pd_grpc.protocol.failures import FailureLog
from pd_grpc.protocol.faults import Fault, Reason, code_and_reason, stage_deadline
from pd_grpc.protocol.refs import mint_id
from pd_grpc.router.fan_out import FanOut
from pd_grpc.router.intake import RoutableRequest, check_shape, fit, tokenize
from pd_grpc.router.machine import INSTANCE
from pd_grpc.router.metrics import RouterMetrics
from pd_grpc.router.policies import pair
from pd_grpc.router.routing import Routing
from pd_grpc.router.runtime import RoutedCall
from pd_grpc.router.spans import name_transfer
from pd_grpc.router.timing import RequestTimes
from pd_grpc.router.unread import Unread
from pd_grpc.telemetry import names
from pd_grpc.telemetry.tracing import (
    Tracing,
    answer_metadata,
    current_context,
    trace_id,
    within_trace,
)
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2

ServicerContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
TRACE_ID = "trace_id"
"""In the metadata of every fault that a client is told."""

Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class RouterService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves `InferenceService` by routing. `draining` refuses what is new."""

    def __init__(self, routing: Routing, tracing: Tracing, metrics: RouterMetrics) -> None:
        self._routing = routing
        self._tracing = tracing
        self._metrics = metrics
        self._failures = FailureLog(routing.log)
        self.draining = False
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leave(self) -> None:
        """The drain's time is over: fail what has no legs yet."""
        if not self._left.done():
            self._left.set_result(None)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: ServicerContext
    ) -> inference_pb2.GetModelInfoResponse:
        try:
            return self._routing.discovery.model()
        except Fault as fault:
            await rpc.abort(context, fault)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: ServicerContext
    ) -> None:
        budget_s = rpc.budget_of(context, self._routing.config)
        parent = within_trace(current_context())
        context.set_trailing_metadata(answer_metadata(parent))
        try:
            await self.route(request, budget_s, parent, partial(rpc.write, context))
        except Fault as fault:
            # Whoever was refused can look up why.
            told = {**fault.metadata, TRACE_ID: trace_id(parent)}
            await rpc.abort(context, replace(fault.for_client(), metadata=told))

    async def route(
        self, request: inference_pb2.GenerateRequest, budget_s: float, parent: Context, write: Write
    ) -> None:
        """Answer `request` message by message within `budget_s` seconds. Raises Fault."""
        accepted = self._routing.clock.now()
        request_id = request.request_id or mint_id("r")
        span = self._tracing.start(
            names.SPAN_REQUEST,
            parent=parent,
            at=accepted,
            attributes={names.ATTR_REQUEST_ID: request_id},
        )
        times = RequestTimes(accepted)
        fault: Fault | None = _DEFECT
        try:
            if self.draining:
                raise Fault(Reason.DRAINING, "the router is draining")
            with self._routing.in_flight.named(request_id):
                await self._answer(request, request_id, times, accepted + budget_s, span, write)
            fault = None
        except Fault as raised:
            fault = raised
            raise
        except asyncio.CancelledError:
            fault = _CLIENT_GONE
            raise
        finally:
            if fault is not None:
                self._failures.note(
                    fault,
                    direct=True,
                    context=Tracing.context(span),
                    key=times.key,
                    request_id=request_id,
                    peer=fault.metadata.get(INSTANCE, ""),
                )
            self._tracing.end(span, error=code_and_reason(fault))
            now = self._routing.clock.now()
            self._metrics.ended(times, _operation(request), self._model(), fault, now)

    async def _answer(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        times: RequestTimes,
        budget_ends: float,
        span: Span,
        write: Write,
    ) -> None:
        routing, tracing = self._routing, self._tracing
        context = Tracing.context(span)
        route = tracing.start(names.SPAN_ROUTE, parent=context, at=times.accepted)
        fault: Fault | None = _DEFECT
        try:
            routable = await self._unless_left(self._read(request, request_id, budget_ends))
            config, discovery = routing.config, routing.discovery
            pairing = pair(
                discovery.ready(types_pb2.ROLE_PREFILL),
                discovery.ready(types_pb2.ROLE_DECODE),
                routing.prefill_load,
                routing.decode_load,
                config.aggregated,
            )
            self._metrics.decided(disaggregated=pairing.prefill is not None, why="configuration")
            call: RoutedCall | FanOut
            if routable.choices > 1:
                call = FanOut(routing, routable, pairing, times, budget_ends, span, tracing)
            else:
                one = times.another()
                unread = Unread(config.unread_tokens)
                call = RoutedCall(
                    routing, routable, pairing, one, budget_ends, span, tracing, unread
                )
                name_transfer(call.key, span, route)
            span.set_attribute(names.ATTR_PROMPT_TOKENS, routable.prompt_tokens)
            fault = None
        except Fault as raised:
            fault = raised
            raise
        except asyncio.CancelledError:
            fault = _CLIENT_GONE
            raise
        finally:
            if fault is not None:
                self._routed(route, times, routing.clock.now(), fault)
        try:
            call.start(lambda at: self._routed(route, times, at, None))
            left = budget_ends - routing.clock.now() + rpc.STATUS_READ_S
            await rpc.write_within(_write_all(call, write), left)
        finally:
            times.key = call.key
            await call.close()
            if times.routed is None:
                self._routed(route, times, routing.clock.now(), _CLIENT_GONE)

    def _routed(self, route: Span, times: RequestTimes, at: float, fault: Fault | None) -> None:
        """Routing is over, by what span and metric say alike."""
        self._tracing.end(route, at=at, error=code_and_reason(fault))
        self._metrics.routed(at - times.accepted, fault)

    async def _unless_left(self, read: Coroutine[Any, Any, RoutableRequest]) -> RoutableRequest:
        """What it reads, or its fault. Fault DRAINING when the router leaves before."""
        reading = asyncio.create_task(read)
        try:
            await asyncio.wait((reading, self._left), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            if self._left.done():
                raise the_router_leaves()
            return reading.result()
        finally:
            reading.cancel()

    def _model(self) -> str:
        """What is served, as far as it is known."""
        views = self._routing.discovery.instances
        return next((view.model.model for view in views if view.model is not None), "")

    async def _read(
        self, request: inference_pb2.GenerateRequest, request_id: str, budget_ends: float
    ) -> RoutableRequest:
        """Validate, tokenize and measure. Fault as `intake` says, or STAGE_DEADLINE."""
        routing = self._routing
        kind = check_shape(request)

        def left() -> float:
            return max(0.0, budget_ends - routing.clock.now())

        await routing.discovery.found(min(left(), routing.config.retry_wait_s))
        limits = routing.discovery.limits()
        try:
            token_ids = await asyncio.wait_for(tokenize(request, kind, routing.tokenizer), left())
        except asyncio.TimeoutError:
            raise stage_deadline("route") from None
        return fit(request, request_id, kind, token_ids, limits, routing.config.default_max_tokens)


def the_router_leaves() -> Fault:
    """What a request hears that is not finished when the drain's time is over."""
    return Fault(Reason.DRAINING, "the router leaves")


_CLIENT_GONE = Fault(Reason.CLIENT_GONE, "the client left")
_DEFECT = Fault(Reason.ENGINE_ERROR, "the router failed")
"""What nobody foresaw."""


def _operation(request: inference_pb2.GenerateRequest) -> str:
    chat = request.WhichOneof("prompt") == "messages"
    return names.OPERATION_CHAT if chat else names.OPERATION_COMPLETION


async def _write_all(call: RoutedCall | FanOut, write: Write) -> None:
    while (message := await call.next_message()) is not None:
        await write(message)
