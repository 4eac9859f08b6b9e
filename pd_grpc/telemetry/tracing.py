"""One trace per request across client, router, P and D.

A span is started and ended with times of the injected clock, and its parent is handed over as a
value: nothing depends on which thread, task or callback happens to run, so a trace survives the
futures of the prepare pool and the engine thread.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from opentelemetry import context as current
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pd_grpc.telemetry import baggage, names, tracestate
from pd_grpc.telemetry.quick_spans import QuickProvider, follows_parents
from pd_grpc.telemetry.recent import NOT_KEPT, RecentTraces

MOST_CHARS = 256
"""Of an attribute that is text."""

_log = logging.getLogger("pd_grpc.telemetry.tracing")

_SCOPE = "pd_grpc"
_W3C = TraceContextTextMapPropagator()
_FIELDS = {*_W3C.fields, baggage.FIELD}
_BAGGAGE: WeakKeyDictionary[Span, str] = WeakKeyDictionary()
"""What the children of a span pass on of its caller's; of few spans, for few callers send any."""
_NO_CONTEXT = Context()
_NO_ATTRIBUTES: Mapping[str, AttributeValue] = {}


class Clock(Protocol):
    """The clock that spans are timed with."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970."""
        ...


class Tracing:
    """Starts and ends the spans of one instance. Safe from any thread.

    Without a provider, and with no trace to keep, nothing is recorded, yet every request has a
    trace id and passes on that of its caller, so that logs and answers name it all the same.
    """

    def __init__(
        self,
        clock: Clock,
        instance: str,
        role: str,
        provider: TracerProvider | None = None,
        keep: int = 0,
    ) -> None:
        """`keep` is how many of the last traces stay in memory, in `recent`."""
        self.recent = RecentTraces(keep)
        self._keeps = keep > 0
        # Without a provider of somebody's, what is not kept goes nowhere.
        self._only_keeps = self._keeps and provider is None
        if self._keeps:
            provider = provider or QuickProvider(shutdown_on_exit=False)
        self._clock = clock
        # One anchor between the two clocks: spans of one process keep their order and lengths even
        # when the wall clock is set.
        self._anchor_ns = clock.wall_ns() - _ns(clock.now())
        self._who: dict[str, AttributeValue] = {names.ATTR_ROLE: role}
        if instance:
            self._who[names.ATTR_INSTANCE] = instance
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer(_SCOPE)
        self._follows = provider is not None and follows_parents(provider.sampler)

    @property
    def records(self) -> bool:
        """Whether any span goes anywhere."""
        return self._tracer is not None

    def now(self) -> float:
        """Seconds on the clock that its spans are timed with."""
        return self._clock.now()

    def start(
        self,
        name: str,
        *,
        parent: Context | None = None,
        at: float | None = None,
        attributes: Mapping[str, AttributeValue] = _NO_ATTRIBUTES,
        links: Sequence[SpanContext] = (),
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Start a span. `parent` None starts a trace; `at` is a time of the clock, None is now.

        One that names spans of several traces in `links` is recorded where one of them is.
        """
        context = _NO_CONTEXT if parent is None else parent
        span = self._begin(name, context, at, attributes, links, kind)
        carried = "" if parent is None else baggage.written(parent)
        if carried and span is not trace.INVALID_SPAN:
            _BAGGAGE[span] = carried
        elif _BAGGAGE and span in _BAGGAGE:
            # That of the caller, who has another now.
            del _BAGGAGE[span]
        return span

    def _begin(
        self,
        name: str,
        context: Context,
        at: float | None,
        attributes: Mapping[str, AttributeValue],
        links: Sequence[SpanContext],
        kind: SpanKind,
    ) -> Span:
        if self._tracer is None:
            return _unrecorded(context)
        # Most spans are of requests that are not sampled. They must cost next to nothing, so the
        # sampler is not asked where it is known to follow the parent.
        above = trace.get_current_span(context)
        if self._follows and _is_left_out(above):
            # Somebody else's that records for itself is not ours to end.
            mine = not above.is_recording()
            return above if mine else NonRecordingSpan(above.get_span_context())
        sampled = [Link(link) for link in links if link.trace_flags & TraceFlags.SAMPLED]
        if (links and not sampled) or (self._only_keeps and name in NOT_KEPT):
            return trace.INVALID_SPAN
        with _HARMLESS:
            return self._tracer.start_span(
                name,
                context,
                kind,
                {**self._who, **_bounded(attributes)},
                sampled,
                self._wall_ns(at),
            )
        return _unrecorded(context)

    def end(
        self,
        span: Span,
        *,
        at: float | None = None,
        error: tuple[str, str] | None = None,
        outcome: str = "ok",
        error_type: str = "",
    ) -> None:
        """End a span with an error's (code, reason), or with `outcome`, which is no error. The type
        of the error is its reason, unless another is given.

        What else is said of an error may name what the client sent, and never enters a span.
        """
        if not span.is_recording():
            return
        if error is None:
            span.set_attribute(names.ATTR_OUTCOME, outcome)
        else:
            code, reason = error
            span.set_attributes(
                {
                    names.ATTR_OUTCOME: reason,
                    names.ATTR_ERROR_TYPE: error_type or reason,
                    names.ATTR_STATUS_CODE: code,
                }
            )
            span.set_status(Status(StatusCode.ERROR, reason))
        with _HARMLESS:
            span.end(self._wall_ns(at))
        if self._keeps and isinstance(span, ReadableSpan):
            self.recent.keep(span)

    def event(
        self,
        span: Span,
        name: str,
        *,
        at: float | None = None,
        attributes: Mapping[str, AttributeValue] = _NO_ATTRIBUTES,
    ) -> None:
        """Note a moment within a span."""
        if span.is_recording():
            span.add_event(name, attributes, self._wall_ns(at))

    @staticmethod
    def context(span: Span) -> Context:
        """What makes `span` the parent of another, here or in another process."""
        context = trace.set_span_in_context(span, _NO_CONTEXT)
        return baggage.handed_on(_BAGGAGE.get(span, ""), context) if _BAGGAGE else context

    def shutdown(self) -> None:
        """Export what is left and stop. Blocks while the collector is slow: not for the loop."""
        if self._provider is not None:
            self._provider.shutdown()

    def _wall_ns(self, at: float | None) -> int:
        return self._anchor_ns + _ns(self._clock.now() if at is None else at)


def inject(
    context: Context | None, metadata: Iterable[tuple[str, Any]] = ()
) -> list[tuple[str, Any]]:
    """The metadata of a call with W3C trace context and baggage in place of any it carries."""
    source = Context() if context is None else context
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, source)
    if carried := baggage.written(source):
        carrier[baggage.FIELD] = carried
    kept = [(key, value) for key, value in metadata if key.lower() not in _FIELDS]
    return kept + list(carrier.items())


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's trace context and baggage; without what it did not send or cannot be read."""
    carrier: dict[str, list[str]] = {}
    for key, value in metadata or ():
        if isinstance(value, str) and key.lower() in _FIELDS:
            carrier.setdefault(key.lower(), []).append(value)
    if not tracestate.is_sound(carrier.get(tracestate.FIELD, ())):
        del carrier[tracestate.FIELD]
    context = _W3C.extract(carrier, Context())
    return baggage.read(carrier.get(baggage.FIELD, ()), context)


def current_context() -> Context:
    """In a handler: that of the call it serves, or its caller's where calls are not recorded."""
    return current.get_current()


def within_trace(context: Context) -> Context:
    """The context, or one in a new trace of which nothing is recorded here."""
    if trace_id(context):
        return context
    return trace.set_span_in_context(_unrecorded(context), context)


def answer_metadata(context: Context) -> tuple[tuple[str, str], ...]:
    """What tells a caller which trace it was, as W3C Trace Context Level 2 has it."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return tuple(("traceresponse", told) for told in (carrier.get("traceparent"),) if told)


def trace_id(context: Context | None) -> str:
    """The trace id as 32 hex digits; empty when the context has none."""
    found = trace.get_current_span(Context() if context is None else context).get_span_context()
    return trace.format_trace_id(found.trace_id) if found.is_valid else ""


def _is_left_out(parent: Span) -> bool:
    """Whether a trace has begun that is not sampled."""
    context = parent.get_span_context()
    return context.is_valid and not context.trace_flags & TraceFlags.SAMPLED


def _unrecorded(parent: Context) -> Span:
    """A span that keeps nothing and stands for its parent, or for a new trace.

    A new trace is marked as sampled, so that an instance further on that does export records it.
    """
    context = trace.get_current_span(parent).get_span_context()
    if context.is_valid:
        return NonRecordingSpan(context)
    return NonRecordingSpan(
        SpanContext(
            trace_id=random.getrandbits(128) or 1,
            span_id=random.getrandbits(64) or 1,
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )
    )


class _Harmless:
    """Around what calls an embedder's sampler or processor, which may raise anything: that must
    not become the fault of a request. Said once for each type."""

    def __init__(self) -> None:
        self._said: set[type[BaseException]] = set()

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if type(error) not in self._said:
            self._said.add(type(error))
            _log.error("a sampler or processor of spans raised", exc_info=error)
        return True


_HARMLESS = _Harmless()


def _bounded(attributes: Mapping[str, AttributeValue]) -> Mapping[str, AttributeValue]:
    """Without what is too long to be a name: callers choose some, and what is refused for its
    length has a span too."""
    if all(not isinstance(each, str) or len(each) <= MOST_CHARS for each in attributes.values()):
        return attributes
    return {k: v[:MOST_CHARS] if isinstance(v, str) else v for k, v in attributes.items()}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
