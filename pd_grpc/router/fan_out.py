"""The shell of a request for several choices: each is a request of its own, and the client hears
them all in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from opentelemetry.trace import Span

from pd_grpc.protocol.faults import Fault, Reason, code_and_reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.router.choices import Choices, knows_prompt, shares_prompt
from pd_grpc.router.intake import RoutableRequest
from pd_grpc.router.policies import Pairing, pair_beside
from pd_grpc.router.routing import Routing
from pd_grpc.router.runtime import RoutedCall
from pd_grpc.router.spans import name_transfer
from pd_grpc.router.timing import RequestTimes
from pd_grpc.router.unread import Unread
from pd_grpc.telemetry import names
from pd_grpc.telemetry.tracing import Tracing
from pd_grpc.v1 import inference_pb2, types_pb2

CHOICE = "choice"
"""In the metadata of the fault of a request: the choice that has failed."""

_LEFT = Fault(Reason.CLIENT_GONE, "the client left, or another choice failed")


@dataclass(frozen=True)
class _Choice:
    """One that has begun. Its `route` ends, as that of a request does, when it has come to P."""

    call: RoutedCall
    span: Span
    route: Span


class FanOut:
    """Drives one `RoutedCall` for each choice, as `Choices` has it. Made, used and closed as one of
    them is."""

    def __init__(
        self,
        routing: Routing,
        request: RoutableRequest,
        pairing: Pairing,
        times: RequestTimes,
        budget_ends: float,
        span: Span,
        tracing: Tracing,
    ) -> None:
        self._routing = routing
        self._request = request
        self._pairing = pairing
        self._times = times
        self._budget_ends = budget_ends
        self._span = span
        self._tracing = tracing
        model = routing.discovery.at(pairing.decode.endpoint).model
        block_size = 0 if model is None else model.layout.block_size
        held_back = shares_prompt(request.prompt_tokens, block_size)
        self._rules = Choices(request.choices, held_back)
        self._unread = Unread(routing.config.unread_tokens)
        self._choices: list[_Choice] = []
        self._failed: int | None = None
        self._named = False
        self._wake = asyncio.Event()
        self._on_routed: Callable[[float], None] = lambda at: None

    @property
    def key(self) -> TransferKey:
        """The transfer of the choice that has failed, otherwise of choice 0."""
        return self._choices[self._failed or 0].call.key

    def start(self, routed: Callable[[float], None]) -> None:
        """See `RoutedCall.start`; `routed` is told of choice 0."""
        self._on_routed = routed
        self._begin(self._rules.start())

    async def next_message(self) -> inference_pb2.GenerateResponse | None:
        """See `RoutedCall.next_message`."""
        while (choice := self._rules.next()) is None:
            if self._failed is not None:
                raise self._fault_of(self._failed)
            if self._rules.complete:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._message_of(choice)

    async def close(self) -> None:
        """See `RoutedCall.close`."""
        try:
            await asyncio.gather(*(choice.call.close() for choice in self._choices))
        finally:
            for choice in self._choices:
                self._end(choice)
            tokens = sum(times.tokens for times in self._times.answers)
            self._span.set_attribute(names.ATTR_OUTPUT_TOKENS, tokens)
            # They tell this of their changes: all would wait for the cyclic collector.
            self._choices.clear()

    # --- the choices ------------------------------------------------------------------------------

    def _begin(self, numbers: range) -> None:
        for number in numbers:
            choice = self._choice(number)
            self._choices.append(choice)
            choice.call.start(partial(self._routed, number))

    def _choice(self, number: int) -> _Choice:
        tracing, now = self._tracing, self._routing.clock.now()
        told: dict[str, str | int] = {
            names.ATTR_REQUEST_ID: self._request.request_id,
            names.ATTR_CHOICE: number,
        }
        parent = Tracing.context(self._span)
        span = tracing.start(names.SPAN_CHOICE, parent=parent, at=now, attributes=told)
        route = tracing.start(names.SPAN_ROUTE, parent=Tracing.context(span), at=now)
        call = RoutedCall(
            self._routing,
            self._request.of_choice(number),
            self._pairing if number == 0 else self._pairing_beside(),
            self._times.another(),
            self._budget_ends,
            span,
            tracing,
            self._unread,
            partial(self._changed, number),
        )
        name_transfer(call.key, span, route)
        return _Choice(call, span, route)

    def _pairing_beside(self) -> Pairing:
        """Where a choice goes that is not the first: to whom that one is with."""
        routing, first = self._routing, self._choices[0].call.machine
        return pair_beside(
            first.pairing.prefill,
            first.decode,
            routing.discovery.ready(types_pb2.ROLE_PREFILL),
            routing.discovery.ready(types_pb2.ROLE_DECODE),
            routing.prefill_load,
            routing.decode_load,
        )

    def _routed(self, number: int, at: float) -> None:
        self._tracing.end(self._choices[number].route, at=at)
        if number == 0:
            self._on_routed(at)

    def _changed(self, number: int) -> None:
        call = self._choices[number].call
        if call.has_message:
            self._rules.has_to_say(number)
        if self._failed is None:
            if call.fault is not None:
                self._fail(number)
            elif number == 0 and (call.finished or knows_prompt(call.machine)):
                self._begin(self._rules.prompt_known())
        self._wake.set()

    def _fail(self, number: int) -> None:
        self._failed = number
        for choice in self._choices:
            choice.call.leave()

    def _fault_of(self, number: int) -> Fault:
        fault = self._choices[number].call.fault
        assert fault is not None, "it has failed"
        return replace(fault, metadata={**fault.metadata, CHOICE: str(number)})

    def _message_of(self, number: int) -> inference_pb2.GenerateResponse:
        call = self._choices[number].call
        message = call.take()
        message.choice = number
        if self._named:
            message.ClearField("request_id")
        self._named = True
        if message.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
            self._rules.said_all(number, message.usage)
        elif call.has_message:
            self._rules.has_to_say(number)
        if self._rules.complete:
            message.total_usage.CopyFrom(self._rules.total)
        return message

    def _end(self, choice: _Choice) -> None:
        """The spans of a choice."""
        call = choice.call
        fault = call.fault or (None if call.finished else _LEFT)
        if choice.route.is_recording():
            self._tracing.end(choice.route, error=code_and_reason(fault))
        self._tracing.end(choice.span, error=code_and_reason(fault))
