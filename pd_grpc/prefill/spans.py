"""P's part of a request's trace, drawn from the machine's actions and the world's answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Fault, TransportFault, code_and_reason
from pd_grpc.protocol.messages import transport_label
from pd_grpc.protocol.refs import TransferKey, key_of
from pd_grpc.telemetry import names
from pd_grpc.telemetry.steps import StepSpans
from pd_grpc.telemetry.tracing import Tracing, inject
from pd_grpc.v1 import prefill_pb2

Metadata = list[tuple[str, str]]

_STAGES = {
    PrefillState.QUEUED: names.SPAN_QUEUE,
    PrefillState.ALLOCATING: names.SPAN_PREPARE,
    PrefillState.PREPARED: names.SPAN_QUEUE,
    PrefillState.COMPUTING: names.SPAN_COMPUTE,
}
"""The stage a request spends each state in; SENDING is told by `pd.send` and `pd.first_token`."""


_MOST_ENDED = 1024
"""Requests of which a Release may yet be sent that are remembered; one that is not begins a trace
of its own."""


@dataclass
class _Trace:
    root: Span
    attributes: Mapping[str, AttributeValue]
    stage: Span | None = None
    stage_name: str = ""
    allocate: Span | None = None
    send: Span | None = None
    first_token: Span | None = None
    strands: set[int] = field(default_factory=set)
    computed_at: float | None = None


class PrefillSpans:
    """`pd.prefill_request` of each request, and under it `pd.queue`, `pd.prepare` with one
    `pd.allocate` per call, `pd.compute`, `pd.send` and `pd.first_token`; and `pd.step` of each
    batch."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._calls: dict[int, tuple[prefill_pb2.PrefillRequest, Context]] = {}
        self._traces: dict[TransferKey, _Trace] = {}
        self._ended: OrderedDict[TransferKey, Metadata] = OrderedDict()
        self._steps = StepSpans(tracing)

    def called(self, event: ev.PrefillCalled, context: Context) -> None:
        """A call has come, with its caller's trace."""
        self._calls[event.call] = (event.request, context)

    def refused(self, call: int, fault: Fault, at: float) -> None:
        """A call was not taken in."""
        request, context = self._calls.pop(call, (None, None))
        if request is not None:
            attributes = _attributes(key_of(request.ref))
            span = self._tracing.start(
                names.SPAN_PREFILL_REQUEST, parent=context, at=at, attributes=attributes
            )
            self._tracing.end(span, at=at, error=code_and_reason(fault))

    def changed(self, change: act.Changed, at: float) -> None:
        """A request moved: end the stage it was in and begin the next."""
        if change.before is None:
            self._begin(change, at)
        trace = self._traces.get(change.key)
        if trace is None:
            return
        if change.before is PrefillState.ALLOCATING and change.after is PrefillState.QUEUED:
            return  # It turns to an alternate D, which is still the same preparation.
        if change.after is PrefillState.SENDING:
            trace.computed_at = at
        name = _STAGES.get(change.after, "")
        if name != trace.stage_name:
            self._end(trace.stage, at, change.fault)
            trace.stage = self._start(trace, name, at) if name else None
            trace.stage_name = name
        if change.after.terminal:
            for span in (trace.allocate, trace.send, trace.first_token, trace.root):
                self._end(span, at, change.fault)
            del self._traces[change.key]
            if change.fault is not None:
                self._ended[change.key] = inject(self._tracing.context(trace.root))
                if len(self._ended) > _MOST_ENDED:
                    self._ended.popitem(last=False)

    def allocate(self, asked: act.SendAllocate, at: float) -> Metadata:
        """An Allocate goes out; its metadata."""
        trace = self._traces.get(asked.key)
        if trace is None:
            return []
        parent = trace.stage or trace.root
        trace.allocate = self._tracing.start(
            names.SPAN_ALLOCATE,
            parent=self._tracing.context(parent),
            at=at,
            attributes={**trace.attributes, names.ATTR_PEER: asked.endpoint},
        )
        return inject(self._tracing.context(trace.allocate))

    def allocated(self, event: ev.AllocateAnswered, at: float) -> None:
        """An Allocate was answered."""
        trace = self._traces.get(event.asked.key)
        if trace is not None:
            if event.response is not None and event.response.cached_tokens and trace.allocate:
                cached = event.response.cached_tokens
                trace.allocate.set_attribute(names.ATTR_CACHED_TOKENS, cached)
            self._end(trace.allocate, at, event.fault)

    def step_began(self, run: act.RunStep, at: float) -> None:
        """A batch enters the engine."""
        traces = map(self._traces.get, run.keys)
        self._steps.began(
            [trace.stage for trace in traces if trace is not None],
            batch=len(run.keys),
            tokens=sum(len(chunk.token_ids) for chunk in run.chunks),
            at=at,
        )

    def step_ended(self, run: act.RunStep, at: float, fault: Fault | None) -> None:
        """It came back."""
        self._steps.ended(at, code_and_reason(fault))
        for key, chunk in zip(run.keys, run.chunks, strict=True):
            trace = self._traces.get(key)
            if trace is not None and trace.stage is not None:
                tokens = {names.ATTR_TOKENS: len(chunk.token_ids), names.ATTR_BATCH: len(run.keys)}
                self._tracing.event(trace.stage, names.EVENT_CHUNK, at=at, attributes=tokens)

    def transfer(self, opened: act.OpenTransfer, at: float) -> Metadata:
        """A Transfer stream is opened; its metadata."""
        trace = self._traces.get(opened.key)
        if trace is None:
            return []
        if trace.send is None:
            trace.send = self._start(trace, names.SPAN_SEND, at)
        trace.send.set_attribute(names.ATTR_TRANSPORT, transport_label(opened.open.transport))
        trace.send.set_attribute(names.ATTR_KV_FORMAT, opened.open.kv_format)
        trace.strands.add(opened.strand)
        return inject(self._tracing.context(trace.send))

    def acked(self, event: ev.KvAcked, at: float) -> None:
        """A shard acknowledged some slabs."""
        trace = self._traces.get(event.key)
        if trace is None or trace.send is None:
            return
        for slab in event.slabs:
            attributes = {
                names.ATTR_LAYER_START: slab.layer,
                names.ATTR_LAYER_COUNT: slab.layers,
                names.ATTR_BLOCK_START: slab.block,
                names.ATTR_BLOCK_COUNT: slab.blocks,
            }
            self._tracing.event(trace.send, names.EVENT_ACK, at=at, attributes=attributes)

    def sent(self, event: ev.TransferCompleted, at: float) -> None:
        """A shard has everything that goes over a strand."""
        trace = self._traces.get(event.key)
        if trace is None:
            return
        trace.strands.discard(event.strand)
        if not trace.strands and trace.send is not None:
            # KV may be acknowledged before the last step is known to have ended.
            exposed_s = 0.0 if trace.computed_at is None else at - trace.computed_at
            trace.send.set_attribute(names.ATTR_EXPOSED_S, exposed_s)
            self._end(trace.send, at, None)

    def first_token(self, sent: act.SendFirstToken, at: float) -> Metadata:
        """SendFirstToken goes out, perhaps for the second time; its metadata."""
        trace = self._traces.get(sent.key)
        if trace is None:
            return []
        if trace.first_token is None:
            trace.first_token = self._start(trace, names.SPAN_FIRST_TOKEN, at)
        return inject(self._tracing.context(trace.first_token))

    def first_token_answered(self, event: ev.FirstTokenAnswered, at: float) -> None:
        """D has the first token. One that was lost may be sent again, within the same span."""
        trace = self._traces.get(event.key)
        if trace is not None and event.fault is None:
            self._end(trace.first_token, at, None)

    def release(self, sent: act.SendRelease) -> Metadata:
        """A Release goes out, perhaps for the second time and after the request's end; its
        metadata."""
        trace = self._traces.get(sent.key)
        if trace is None:
            return self._ended.get(sent.key, [])
        return inject(self._tracing.context(trace.root))

    def _begin(self, change: act.Changed, at: float) -> None:
        request, context = self._calls.pop(change.call)
        attributes = _attributes(change.key)
        root = self._tracing.start(
            names.SPAN_PREFILL_REQUEST,
            parent=context,
            at=at,
            attributes={
                **attributes,
                names.ATTR_REQUEST_ID: request.request_id,
                names.ATTR_PROMPT_TOKENS: len(request.token_ids),
                names.ATTR_GENERATED_TOKENS: len(request.generated_token_ids),
            },
        )
        self._traces[change.key] = _Trace(root, attributes)

    def _start(self, trace: _Trace, name: str, at: float) -> Span:
        return self._tracing.start(
            name, parent=self._tracing.context(trace.root), at=at, attributes=trace.attributes
        )

    def _end(self, span: Span | None, at: float, fault: Fault | TransportFault | None) -> None:
        """End a span unless it has ended: then it records nothing more, and this does nothing."""
        if span is not None:
            self._tracing.end(span, at=at, error=code_and_reason(fault))


def _attributes(key: TransferKey) -> Mapping[str, AttributeValue]:
    return {names.ATTR_TRANSFER_ID: key.transfer_id, names.ATTR_ATTEMPT: key.attempt}
