"""Spans in the wire format of OTLP, written by hand, which takes a fraction of the time.

The thread that exports shares Python's lock with the event loop, so what it saves is saved of every
request. Field numbers are those of opentelemetry/proto/trace/v1/trace.proto and of common.proto
beside it. What is uncommon, a list as a value, is left to OpenTelemetry's own encoder. Needs the
extra `otlp`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, Status

MOST_CACHED = 4096
"""Attributes whose encoding is remembered, and links: most spans share theirs with others."""
_LONGEST_CACHED = 128
_MOST_ENVELOPES = 64

_PLAIN = frozenset({str, bool, int, float, bytes, type(None)})
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_SHORT = [bytes((n,)) for n in range(128)]
_FIXED32 = struct.Struct("<I")
_FIXED64 = struct.Struct("<Q")
_DOUBLE = struct.Struct("<d")
# Field 6 as a varint of one byte, then 7 and 8, which are fixed64.
_KIND_AND_TIMES = struct.Struct("<BBBQBQ")


class _Uncommon(Exception):
    """A value that is not encoded here."""


class FastSpanExporter(OTLPSpanExporter):
    """OpenTelemetry's exporter over gRPC with an encoder of its own; in all else it is that one."""

    def __init__(self, endpoint: str, timeout: float) -> None:
        """To the collector at `endpoint` (host:port), without TLS; `timeout` in seconds is how long
        one batch is tried."""
        super().__init__(endpoint=endpoint, insecure=True, timeout=timeout)
        self._encoder = SpanEncoder()

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        # A version that calls it otherwise uses its own encoder, and is slower.
        return ExportTraceServiceRequest.FromString(self._encoder.encode(data))


class SpanEncoder:
    """Encodes the batches of one exporter, one at a time."""

    def __init__(self) -> None:
        self._cached: dict[tuple[str, type, Any], bytes] = {}
        self._links: dict[tuple[int, int, bool], bytes] = {}
        self._envelopes: dict[tuple[int, int], tuple[Any, Any, bytes, bytes]] = {}

    def encode(self, spans: Sequence[ReadableSpan]) -> bytes:
        """A serialized ExportTraceServiceRequest of these ended spans."""
        try:
            return self._request(spans)
        except (_Uncommon, UnicodeEncodeError, OverflowError, struct.error):
            whole: bytes = encode_spans(spans).SerializeToString()
            return whole

    def _request(self, spans: Sequence[ReadableSpan]) -> bytes:
        groups: dict[tuple[int, int], list[ReadableSpan]] = {}
        for span in spans:
            groups.setdefault((id(span.resource), id(span.instrumentation_scope)), []).append(span)
        request: list[bytes] = []
        for group in groups.values():
            resource, scope = self._envelope(group[0])
            scope_spans = [scope]
            for span in group:
                _add(scope_spans, b"\x12", self._span(span))
            body = [resource]
            _add(body, b"\x12", b"".join(scope_spans))
            _add(request, b"\x0a", b"".join(body))
        return b"".join(request)

    def _envelope(self, span: ReadableSpan) -> tuple[bytes, bytes]:
        """A ResourceSpans without its scopes and a ScopeSpans without its spans, which may follow:
        the fields of a message may come in any order."""
        resource, scope = span.resource, span.instrumentation_scope
        key = (id(resource), id(scope))
        if key not in self._envelopes:
            (message,) = encode_spans([span]).resource_spans
            (inner,) = message.scope_spans
            del inner.spans[:]
            scope_bytes = inner.SerializeToString()
            del message.scope_spans[:]
            if len(self._envelopes) >= _MOST_ENVELOPES:
                self._envelopes.clear()
            # What is kept with them has its id as long as they are.
            self._envelopes[key] = resource, scope, message.SerializeToString(), scope_bytes
        return self._envelopes[key][2:]

    def _span(self, span: ReadableSpan) -> bytes:
        context, parent = span.get_span_context(), span.parent
        assert context is not None and span.start_time is not None and span.end_time is not None
        parts = _ids(context)
        if context.trace_state:
            state = ",".join(f"{key}={value}" for key, value in context.trace_state.items())
            _add(parts, b"\x1a", state.encode())
        if parent is not None:
            parts += (b"\x22\x08", parent.span_id.to_bytes(8, "big"))
        _add(parts, b"\x2a", span.name.encode())
        # SpanKind counts from INTERNAL as 0, the protocol from UNSPECIFIED.
        kind = span.kind.value + 1
        parts.append(_KIND_AND_TIMES.pack(0x30, kind, 0x39, span.start_time, 0x41, span.end_time))
        self._add_attributes(parts, b"\x4a", span.attributes)
        _add_count(parts, b"\x50", span.dropped_attributes)
        for event in span.events:
            _add(parts, b"\x5a", self._event(event))
        _add_count(parts, b"\x60", span.dropped_events)
        parts += [self._link(link) for link in span.links]
        _add_count(parts, b"\x70", span.dropped_links)
        _add(parts, b"\x7a", _status(span.status))
        parts += (b"\x85\x01", _flags(parent))
        return b"".join(parts)

    def _event(self, event: Event) -> bytes:
        parts = [b"\x09", _FIXED64.pack(event.timestamp)]
        _add(parts, b"\x12", event.name.encode())
        self._add_attributes(parts, b"\x1a", event.attributes)
        _add_count(parts, b"\x20", event.dropped_attributes)
        return b"".join(parts)

    def _link(self, link: Link) -> bytes:
        """The field of a link. Every step that serves a request links to it alike."""
        context, plain = link.context, not link.attributes and not link.dropped_attributes
        key = context.trace_id, context.span_id, context.is_remote
        found = self._links.get(key) if plain else None
        if found is not None:
            return found
        parts = _ids(context)
        self._add_attributes(parts, b"\x22", link.attributes)
        _add_count(parts, b"\x28", link.dropped_attributes)
        parts += (b"\x35", _flags(context))
        field: list[bytes] = []
        _add(field, b"\x6a", b"".join(parts))
        encoded = b"".join(field)
        if plain:
            if len(self._links) >= MOST_CACHED:
                self._links.clear()
            self._links[key] = encoded
        return encoded

    def _add_attributes(self, parts: list[bytes], tag: bytes, attributes: Any) -> None:
        if not attributes:
            return
        # A copy is a plain dict, through which one goes many times quicker than through a view.
        for key, value in attributes.copy().items():
            kind = value.__class__
            if kind not in _PLAIN:
                raise _Uncommon(key)
            found = self._cached.get((key, kind, value))
            parts += (tag, self._attribute(key, value) if found is None else found)

    def _attribute(self, key: str, value: Any) -> bytes:
        """A KeyValue behind its length."""
        body: list[bytes] = []
        _add(body, b"\x0a", key.encode())
        _add(body, b"\x12", _value(value))
        whole: list[bytes] = []
        _add(whole, b"", b"".join(body))
        encoded = b"".join(whole)
        # Floats hardly repeat, and -0.0 is equal to 0.0.
        if len(encoded) <= _LONGEST_CACHED and value.__class__ is not float:
            if len(self._cached) >= MOST_CACHED:
                self._cached.clear()
            self._cached[key, value.__class__, value] = encoded
        return encoded


def _value(value: Any) -> bytes:
    """An AnyValue."""
    parts: list[bytes] = []
    if isinstance(value, str):
        _add(parts, b"\x0a", value.encode())
    elif isinstance(value, bool):
        parts += (b"\x10", _SHORT[value])
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise _Uncommon(value)
        parts += (b"\x18", _varint(value % (1 << 64)))
    elif isinstance(value, float):
        parts += (b"\x21", _DOUBLE.pack(value))
    elif isinstance(value, bytes):
        _add(parts, b"\x3a", value)
    return b"".join(parts)


def _status(status: Status) -> bytes:
    parts: list[bytes] = []
    if status.description:
        _add(parts, b"\x12", status.description.encode())
    _add_count(parts, b"\x18", status.status_code.value)
    return b"".join(parts)


def _ids(context: SpanContext) -> list[bytes]:
    return [
        b"\x0a\x10",
        context.trace_id.to_bytes(16, "big"),
        b"\x12\x08",
        context.span_id.to_bytes(8, "big"),
    ]


def _flags(context: SpanContext | None) -> bytes:
    remote = context is not None and context.is_remote
    return _FIXED32.pack(_HAS_IS_REMOTE | (_IS_REMOTE if remote else 0))


def _add(parts: list[bytes], tag: bytes, body: bytes) -> None:
    """A field with a length."""
    size = len(body)
    parts += (tag, _SHORT[size] if size < 128 else _varint(size), body)


def _add_count(parts: list[bytes], tag: bytes, count: int) -> None:
    if count:
        parts += (tag, _varint(count))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
