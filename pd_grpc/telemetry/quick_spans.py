"""Spans that cost a third of what OpenTelemetry's SDK makes of them, behind its own interfaces.

The provider is the SDK's, with its sampler, resource, limits and processors; its tracers make the
spans themselves, as plain dicts and lists, where the SDK makes locks, views and copies that a
server does not need whose spans live on one loop.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from time import time_ns
from typing import Any

from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import (
    Event,
    ReadableSpan,
    SpanLimits,
    SpanProcessor,
    Tracer,
    TracerProvider,
)
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)
from opentelemetry.util.types import Attributes, AttributeValue

_PLAIN = frozenset({str, bool, int, float, bytes})
_UNSET = Status(StatusCode.UNSET)
_RANDOM_TRACE_ID = 2
"""The flag of a trace id that is random, by W3C's level 2."""


class QuickProvider(TracerProvider):
    """The SDK's provider; limits follow its environment variables, and the sampler too unless there
    is another."""

    def __init__(
        self,
        resource: Resource | None = None,
        shutdown_on_exit: bool = True,
        sampler: Sampler | None = None,
    ) -> None:
        self.limits = SpanLimits()
        self.processors: tuple[SpanProcessor, ...] = ()
        super().__init__(
            sampler, resource, span_limits=self.limits, shutdown_on_exit=shutdown_on_exit
        )

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        """For every tracer, those there are and those to come."""
        super().add_span_processor(span_processor)
        self.processors += (span_processor,)

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes | None = None,
    ) -> trace.Tracer:
        """One that makes quick spans, unless the SDK is switched off, or its spans are made of more
        than ours: then its own."""
        tracer = super().get_tracer(
            instrumenting_module_name, instrumenting_library_version, schema_url, attributes
        )
        if not isinstance(tracer, Tracer):
            return tracer
        scope = InstrumentationScope(
            instrumenting_module_name, instrumenting_library_version, schema_url, attributes
        )
        quick = QuickTracer(self, tracer, scope)
        return quick if quick.fits() else tracer


class QuickTracer(trace.Tracer):
    """Makes the spans of one scope. Safe from any thread."""

    def __init__(
        self, provider: QuickProvider, tracer: Tracer, scope: InstrumentationScope
    ) -> None:
        self.provider = provider
        self.scope = scope
        self._tracer = tracer
        generator = provider.id_generator
        self._span_id = generator.generate_span_id
        self._trace_id = generator.generate_trace_id
        is_random = getattr(generator, "is_trace_id_random", lambda: False)()
        self._flags = TraceFlags(TraceFlags.SAMPLED | (_RANDOM_TRACE_ID if is_random else 0))
        self._follows = follows_parents(provider.sampler)

    def fits(self) -> bool:
        """Whether a span of the SDK's has nothing that a quick one lacks."""
        if QuickSpan.__abstractmethods__:  # of a newer API
            return False
        none = trace.INVALID_SPAN_CONTEXT
        quick = QuickSpan(self, "", none, None, SpanKind.INTERNAL, None, None, 0)
        return vars(ReadableSpan("")).keys() <= vars(quick).keys()

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        """Start a span, timed in nanoseconds since 1970."""
        above = trace.get_current_span(context).get_span_context()
        parent = above if above.is_valid else None
        if parent is not None and self._follows and parent.trace_flags & TraceFlags.SAMPLED:
            trace_id, flags = parent.trace_id, parent.trace_flags
            state: TraceState | None = parent.trace_state
        else:
            trace_id = self._trace_id() if parent is None else parent.trace_id
            found = self.provider.sampler.should_sample(
                context, trace_id, name, kind, attributes, links or ()
            )
            flags, state, attributes = self._flags, found.trace_state, found.attributes
            if parent is not None:
                flags = TraceFlags(parent.trace_flags | TraceFlags.SAMPLED)
            if found.decision is not Decision.RECORD_AND_SAMPLE:
                # What would be recorded and not sampled, a processor of the SDK would drop.
                left_out = TraceFlags(flags & ~TraceFlags.SAMPLED)
                ids = SpanContext(trace_id, self._span_id(), False, left_out, state)
                return NonRecordingSpan(ids)
        ids = SpanContext(trace_id, self._span_id(), False, flags, state)
        began = time_ns() if start_time is None else start_time
        span = QuickSpan(self, name, ids, parent, kind, attributes, links, began)
        for processor in self.provider.processors:
            processor.on_start(span, context)  # type: ignore[arg-type]  # a span like the SDK's
        return span

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Span]:  # type: ignore[override]
        """The SDK's own: nothing here is in a hurry that uses it."""
        return self._tracer.start_as_current_span(*args, **kwargs)


class QuickSpan(ReadableSpan, Span):
    """Recorded until it ends; what comes later changes nothing."""

    def __init__(
        self,
        tracer: QuickTracer,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: Attributes,
        links: Sequence[Link] | None,
        start_time: int,
    ) -> None:
        # As ReadableSpan keeps them.
        self._name = name
        self._context = self._ids = context
        self._parent = parent
        self._kind = kind
        self._start_time = start_time
        self._end_time: int | None = None
        self._status = _UNSET
        self._resource = tracer.provider.resource
        self._instrumentation_scope = tracer.scope
        self._instrumentation_info = None
        self._attributes: dict[str, Any] = {}
        self._events: list[Event] | tuple[()] = ()
        self._links: list[Link] | tuple[()] = ()
        self._provider = tracer.provider
        self._dropped_attributes = self._dropped_events = self._dropped_links = 0
        if attributes:
            self.set_attributes(attributes)
        if links:
            most = tracer.provider.limits.max_links
            self._links = list(links[-most:] if most else links if most is None else ())
            self._dropped_links = len(links) - len(self._links)

    @property
    def dropped_attributes(self) -> int:
        return self._dropped_attributes

    @property
    def dropped_events(self) -> int:
        return self._dropped_events

    @property
    def dropped_links(self) -> int:
        return self._dropped_links

    def get_span_context(self) -> SpanContext:
        return self._ids

    def is_recording(self) -> bool:
        return self._end_time is None

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        self.set_attributes({key: value})

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Beyond as many as the limits allow, the newest are left out."""
        if self._end_time is not None:
            return
        limits, mine = self._provider.limits, self._attributes
        most, longest = limits.max_span_attributes, limits.max_span_attribute_length
        for key, value in attributes.items():
            if most is not None and len(mine) >= most and key not in mine:
                self._dropped_attributes += 1
            elif value.__class__ in _PLAIN and longest is None:
                mine[key] = value
            else:
                mine[key] = _cleaned(value, longest)

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Beyond as many as the limits allow, the oldest are dropped."""
        if self._end_time is not None:
            return
        limits = self._provider.limits
        most, longest = limits.max_event_attributes, limits.max_attribute_length
        about: Any = {}
        if attributes and most is not None and len(attributes) > most:
            about = BoundedAttributes(most, attributes, max_value_len=longest)
        else:
            for key, value in (attributes or {}).items():
                plain = value.__class__ in _PLAIN and longest is None
                about[key] = value if plain else _cleaned(value, longest)
        if not self._events:
            self._events = []
        self._events.append(Event(name, about, time_ns() if timestamp is None else timestamp))
        if limits.max_events is not None and len(self._events) > limits.max_events:
            del self._events[0]
            self._dropped_events += 1

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Beyond as many as the limits allow, the oldest are dropped."""
        if self._end_time is not None:
            return
        self._links = [*self._links, Link(context, attributes)]
        most = self._provider.limits.max_links
        if most is not None and len(self._links) > most:
            del self._links[0]
            self._dropped_links += 1

    def update_name(self, name: str) -> None:
        if self._end_time is None:
            self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """One that is OK stays so, and UNSET changes nothing."""
        wanted = status if isinstance(status, Status) else Status(status, description)
        settled = self._end_time is not None or self._status.status_code is StatusCode.OK
        if not settled and wanted.status_code is not StatusCode.UNSET:
            self._status = wanted

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """An event of OpenTelemetry's form."""
        about: dict[str, AttributeValue] = {
            "exception.type": type(exception).__qualname__,
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**about, **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """Hand it to the processors; nothing the second time."""
        if self._end_time is not None:
            return
        self._end_time = time_ns() if end_time is None else end_time
        for processor in self._provider.processors:
            processor.on_end(self)


def follows_parents(sampler: Sampler) -> bool:
    """Whether a child of a span is sampled if the span is, and never otherwise: so of the samplers
    whose names begin with `parentbased`, which say so of themselves."""
    about = sampler.get_description()
    return about.startswith("ParentBased{") and all(
        f"{whose}ParentSampled:AlwaysOnSampler" in about
        and f"{whose}ParentNotSampled:AlwaysOffSampler" in about
        for whose in ("remote", "local")
    )


def _cleaned(value: Any, longest: int | None) -> AttributeValue:
    """What an attribute may be, cut to `longest` characters."""
    if isinstance(value, str):
        return value[:longest]
    if value is None or isinstance(value, (bool, int, float, bytes)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _cleaned(each, longest) for key, each in value.items()}
    if isinstance(value, Sequence):
        return tuple(_cleaned(each, longest) for each in value)
    return str(value)[:longest]
