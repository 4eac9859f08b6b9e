"""Spans as AdminService.GetTrace shows them, and how those who asked read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import format_span_id, format_trace_id
from opentelemetry.util.types import AttributeValue

from pd_grpc.protocol.messages import seconds
from pd_grpc.telemetry import names
from pd_grpc.telemetry.partition import Moment, Work
from pd_grpc.v1 import admin_pb2

_ELSEWHERE = frozenset({names.ATTR_INSTANCE, names.ATTR_ROLE, names.ATTR_OUTCOME})
"""Attributes that have a field of their own."""


def span_messages(spans: Iterable[ReadableSpan]) -> list[admin_pb2.Span]:
    """Ended spans, in their order."""
    return [_message(span) for span in spans]


def read_spans(messages: Iterable[admin_pb2.Span]) -> list[Work]:
    """What was told of them, in their order."""
    return [
        Work(
            span.span_id,
            span.parent_id,
            span.name,
            span.instance,
            span.start.ToNanoseconds(),
            seconds(span.duration),
            span.outcome,
            dict(span.attributes),
            [
                Moment(event.name, seconds(event.after), dict(event.attributes))
                for event in span.events
            ],
        )
        for span in messages
    ]


def _message(span: ReadableSpan) -> admin_pb2.Span:
    context = span.get_span_context()
    assert context is not None and span.start_time is not None and span.end_time is not None
    attributes = span.attributes or {}
    message = admin_pb2.Span(
        trace_id=format_trace_id(context.trace_id),
        span_id=format_span_id(context.span_id),
        parent_id="" if span.parent is None else format_span_id(span.parent.span_id),
        name=span.name,
        instance=str(attributes.get(names.ATTR_INSTANCE, "")),
        role=str(attributes.get(names.ATTR_ROLE, "")),
        outcome=str(attributes.get(names.ATTR_OUTCOME, "")),
        attributes=_words(attributes, _ELSEWHERE),
        events=[_event(each, span.start_time) for each in span.events],
    )
    message.start.FromNanoseconds(span.start_time)
    message.duration.FromNanoseconds(span.end_time - span.start_time)
    return message


def _event(event: Event, began_ns: int) -> admin_pb2.SpanEvent:
    message = admin_pb2.SpanEvent(name=event.name, attributes=_words(event.attributes or {}))
    message.after.FromNanoseconds(event.timestamp - began_ns)
    return message


def _words(
    attributes: Mapping[str, AttributeValue | Sequence[AttributeValue]],
    without: frozenset[str] = frozenset(),
) -> dict[str, str]:
    return {name: str(value) for name, value in attributes.items() if name not in without}
