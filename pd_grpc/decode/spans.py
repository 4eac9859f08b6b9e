"""D's part of a request's trace, drawn from the machine's changes of state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from pd_grpc.decode.actions import Changed, StepPlan
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault, code_and_reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry import names
from pd_grpc.telemetry.steps import StepSpans
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
    call: int | None = None
    """The client's, until its second token."""
    shown: int = 0
    """Tokens shown to it so far."""
    computing: bool = False
    """Whether its own prefill has begun."""
    decoding: bool = False
    """Whether it has begun to."""
    span: Span | None = None
    step_wait: Span | None = None


class DecodeSpans:
    """`pd.reserve`, `pd.receive`, `pd.decode` of each transfer, `pd.queue` and `pd.compute` instead
    of the first two where D prefills it itself, and `pd.step` of each batch.

    They adjoin: from the first token to the second a client waits for the rest of `pd.receive`, for
    `pd.step_wait`, and for the step that then begins.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._requests: dict[TransferKey, _Request] = {}
        self._calls: dict[int, _Request] = {}
        self._steps = StepSpans(tracing)

    def __len__(self) -> int:
        """Transfers of which something is kept."""
        return len(self._requests)

    def allocate(self, key: TransferKey, context: Context, at: float) -> None:
        """P asks: the wait for blocks begins."""
        request = self._requests.setdefault(key, _Request())
        if request.span is None:
            request.prefill = context
            request.span = self._start(names.SPAN_RESERVE, key, context, at)

    def client(
        self, key: TransferKey, call: int, context: Context, at: float, local: bool = False
    ) -> None:
        """A client's leg came; a second one for the same transfer will be refused. `local` when no
        P has to do with it: it waits for the engine."""
        request = self._requests.setdefault(key, _Request(local=local))
        if request.client is not None:
            return
        request.client, request.call = context, call
        self._calls[call] = request
        if local:
            request.span = self._start(names.SPAN_QUEUE, key, context, at)

    def forget(self, key: TransferKey) -> None:
        """There is no such transfer, or none any more."""
        request = self._requests.pop(key, None)
        if request is not None and request.call is not None:
            self._calls.pop(request.call, None)

    def turned_away(self, call: int) -> None:
        """A client's leg was refused: the next one may be the right one."""
        request = self._calls.pop(call, None)
        if request is not None:
            request.client = request.call = None

    def wrote(self, call: int, tokens: int, at: float) -> None:
        """Tokens have left for a client; of interest are its first two."""
        request = self._calls.get(call)
        if request is None or not tokens:
            return
        first, request.shown = not request.shown, request.shown + tokens
        if first:
            self._moment(request, names.EVENT_FIRST_TOKEN, at)
        if request.shown > 1:
            self._moment(request, names.EVENT_SECOND_TOKEN, at)
            del self._calls[call]
            request.call = None

    def changed(self, change: Changed, at: float) -> None:
        """A transfer moved: end what it was doing and start what it does now."""
        request = self._requests.get(change.key)
        if change.after.terminal:
            self.forget(change.key)
        if request is None:
            return
        if change.after is DecodeState.PREEMPTED or change.before is DecodeState.PREEMPTED:
            if request.span is not None:
                self._tracing.event(request.span, change.after.name.lower(), at=at)
            begins = change.after is DecodeState.DECODING and not request.decoding
            if not change.after.terminal and not begins:
                return
        if change.after is DecodeState.RECEIVING or change.after is DecodeState.WAITING:
            return
        if request.local and change.after is DecodeState.RESERVED:
            return  # It has its blocks, and still waits for the engine.
        self._end(request, at, change.fault)
        name = _NEXT_SPAN.get(change.after)
        if name is not None:
            decoding = change.after is DecodeState.DECODING
            parent = request.client if decoding else request.prefill
            request.span = self._start(name, change.key, parent, at)
            if decoding:
                request.decoding = True
                waits = self._tracing.context(request.span)
                request.step_wait = self._start(names.SPAN_STEP_WAIT, change.key, waits, at)

    def carried(self, key: TransferKey, transport: str, kv_format: str) -> None:
        """How the KV of a transfer comes, and in which format."""
        request = self._requests.get(key)
        if request is not None and request.span is not None:
            request.span.set_attribute(names.ATTR_TRANSPORT, transport)
            request.span.set_attribute(names.ATTR_KV_FORMAT, kv_format)

    def refused(self, key: TransferKey, fault: Fault, at: float) -> None:
        """An Allocate ended without a grant."""
        request = self._requests.get(key)
        if request is None or request.decoding:
            return
        self._end(request, at, fault)
        if request.client is None:
            self.forget(key)

    def step_began(
        self,
        plan: StepPlan,
        prefilling: Sequence[TransferKey],
        decoding: Sequence[TransferKey],
        at: float,
    ) -> None:
        """A batch entered the engine; all that it serves are named."""
        for key in prefilling:
            self._computes(key, at)
        for key in decoding:
            self._served(key, at)
        known = map(self._requests.get, (*prefilling, *decoding))
        self._steps.began(
            [request.span for request in known if request is not None],
            batch=len(plan.prefill) + len(plan.decode),
            tokens=sum(len(c.token_ids) for c in plan.prefill) + len(plan.decode),
            at=at,
        )

    def step_ended(self, at: float, fault: Fault | None) -> None:
        """It came back."""
        self._steps.ended(at, code_and_reason(fault))

    def _computes(self, key: TransferKey, at: float) -> None:
        """It is in a batch: its own prefill begins with the first."""
        request = self._requests.get(key)
        if request is not None and request.local and not request.computing:
            self._end(request, at, None)
            request.computing = True
            request.span = self._start(names.SPAN_COMPUTE, key, request.client, at)

    def _served(self, key: TransferKey, at: float) -> None:
        """It is in a batch that brings its next token: it waits no more."""
        request = self._requests.get(key)
        if request is not None and request.step_wait is not None:
            self._tracing.end(request.step_wait, at=at)
            request.step_wait = None

    def _moment(self, request: _Request, name: str, at: float) -> None:
        if request.span is not None:
            self._tracing.event(request.span, name, at=at)

    def _start(self, name: str, key: TransferKey, parent: Context | None, at: float) -> Span:
        attributes: Mapping[str, AttributeValue] = {
            names.ATTR_TRANSFER_ID: key.transfer_id,
            names.ATTR_ATTEMPT: key.attempt,
        }
        return self._tracing.start(name, parent=parent, at=at, attributes=attributes)

    def _end(self, request: _Request, at: float, fault: Fault | None) -> None:
        error = code_and_reason(fault)
        for span in (request.step_wait, request.span):
            if span is not None:
                self._tracing.end(span, at=at, error=error)
        request.step_wait = request.span = None
