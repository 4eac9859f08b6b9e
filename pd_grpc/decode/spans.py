"""D's part of a request's trace, drawn from the machine's changes of state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext
from opentelemetry.util.types import AttributeValue

from pd_grpc.decode.actions import Changed, StepPlan
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry import names
from pd_grpc.telemetry.tracing import Tracing

_NEXT_SPAN = {
    DecodeState.RESERVED: names.SPAN_RECEIVE,
    DecodeState.DECODING: names.SPAN_DECODE,
}


@dataclass
class _Request:
    prefill: Context | None = None
    client: Context | None = None
    local: bool = False
    span: Span | None = None
    decode: SpanContext | None = None


class DecodeSpans:
    """`pd.reserve`, `pd.receive`, `pd.decode` of each transfer, `pd.compute` instead of the first
    two where D prefills it itself, and `pd.step` of each batch."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._requests: dict[TransferKey, _Request] = {}
        self._step: Span | None = None

    def __len__(self) -> int:
        """Transfers of which something is kept."""
        return len(self._requests)

    def allocate(self, key: TransferKey, context: Context, at: float) -> None:
        """P asks: the wait for blocks begins."""
        request = self._requests.setdefault(key, _Request())
        if request.span is None:
            request.prefill = context
            request.span = self._start(names.SPAN_RESERVE, key, context, at)

    def client(self, key: TransferKey, context: Context, local: bool = False) -> None:
        """A client's leg came; a second one for the same transfer will be refused. `local` when no
        P has to do with it."""
        request = self._requests.setdefault(key, _Request(local=local))
        if request.client is None:
            request.client = context

    def forget(self, key: TransferKey) -> None:
        """There is no such transfer."""
        self._requests.pop(key, None)

    def changed(self, change: Changed, at: float) -> None:
        """A transfer moved: end what it was doing and start what it does now."""
        request = self._requests.get(change.key)
        if change.after.terminal:
            self._requests.pop(change.key, None)
        if request is None:
            return
        if change.after is DecodeState.PREEMPTED or change.before is DecodeState.PREEMPTED:
            if request.span is not None:
                self._tracing.event(request.span, change.after.name.lower(), at=at)
            if not change.after.terminal:
                return
        if change.after is DecodeState.RECEIVING or change.after is DecodeState.WAITING:
            return
        self._end(request, at, change.fault)
        name = _NEXT_SPAN.get(change.after)
        if name is not None and not (request.local and name == names.SPAN_RECEIVE):
            decoding = change.after is DecodeState.DECODING
            parent = request.client if decoding else request.prefill
            request.span = self._start(name, change.key, parent, at)
            if decoding:
                request.decode = request.span.get_span_context()

    def refused(self, key: TransferKey, fault: Fault, at: float) -> None:
        """An Allocate ended without a grant."""
        request = self._requests.get(key)
        if request is None or request.decode is not None:
            return
        self._end(request, at, fault)
        if request.client is None:
            del self._requests[key]

    def step_began(self, plan: StepPlan, keys: Sequence[TransferKey], at: float) -> None:
        """A batch entered the engine, linked to the requests it serves."""
        for key in keys:
            self._computes(key, at)
        known = [self._requests[key] for key in keys if key in self._requests]
        links = [r.decode for r in known if r.decode is not None and r.decode.is_valid]
        attributes: Mapping[str, AttributeValue] = {
            names.ATTR_BATCH: len(plan.decode),
            names.ATTR_TOKENS: sum(len(c.token_ids) for c in plan.prefill) + len(plan.decode),
        }
        self._step = self._tracing.start(names.SPAN_STEP, at=at, attributes=attributes, links=links)

    def step_ended(self, at: float, fault: Fault | None) -> None:
        """It came back."""
        if self._step is not None:
            self._tracing.end(self._step, at=at, error=_error(fault))
            self._step = None

    def _computes(self, key: TransferKey, at: float) -> None:
        """It is in a batch: its own prefill begins with the first."""
        request = self._requests.get(key)
        if request is not None and request.local and request.span is None:
            request.span = self._start(names.SPAN_COMPUTE, key, request.client, at)

    def _start(self, name: str, key: TransferKey, parent: Context | None, at: float) -> Span:
        attributes: Mapping[str, AttributeValue] = {
            names.ATTR_TRANSFER_ID: key.transfer_id,
            names.ATTR_ATTEMPT: key.attempt,
        }
        return self._tracing.start(name, parent=parent, at=at, attributes=attributes)

    def _end(self, request: _Request, at: float, fault: Fault | None) -> None:
        if request.span is not None:
            self._tracing.end(request.span, at=at, error=_error(fault))
            request.span = None


def _error(fault: Fault | None) -> tuple[str, str, str] | None:
    return None if fault is None else (fault.code.name, fault.reason.value, fault.message)
