"""The last traces of one instance, in memory: what an operator can read without any backend."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from opentelemetry.sdk.trace import ReadableSpan

from pd_grpc.telemetry import names

MOST_SPANS = 256
"""Spans kept of one trace, the newest; a caller may send all its requests in one."""

SPANS_A_TRACE = 64
"""Spans kept of all traces together, for each that may be kept. A request leaves some 20 on an
instance, with a retry twice as many. How much one holds, the limits of OpenTelemetry's SDK say."""

NOT_KEPT = frozenset({names.SPAN_STEP})
_ASKED_FOR = (names.ATTR_TRANSFER_ID, names.ATTR_REQUEST_ID)
_HEX = frozenset("0123456789abcdef")


class RecentTraces:
    """Keeps the spans of the last `traces` traces that an instance took part in. Safe from any
    thread. The steps of an engine belong to many requests and are not kept."""

    def __init__(self, traces: int) -> None:
        self._most = traces
        self._most_spans = traces * SPANS_A_TRACE
        self._lock = threading.Lock()
        self._traces: OrderedDict[int, deque[ReadableSpan]] = OrderedDict()
        self._spans = 0

    def keep(self, span: ReadableSpan) -> None:
        """Keep a span that has ended."""
        context = span.get_span_context()
        if context is None or span.name in NOT_KEPT:
            return
        with self._lock:
            spans = self._traces.get(context.trace_id)
            if spans is None:
                spans = self._traces[context.trace_id] = deque(maxlen=MOST_SPANS)
            self._traces.move_to_end(context.trace_id)
            self._spans += len(spans) < MOST_SPANS
            spans.append(span)
            while len(self._traces) > self._most or self._has_too_many():
                self._spans -= len(self._traces.popitem(last=False)[1])

    def find(self, wanted: str) -> list[ReadableSpan]:
        """The spans of a trace by its id in hex digits, or of the newest trace of a request or
        transfer by its id; none when it is not known."""
        with self._lock:
            by_id = self._traces.get(_trace_id(wanted))
            if by_id is not None:
                return list(by_id)
            held = [list(spans) for spans in self._traces.values()]
        return next((s for s in reversed(held) if any(_is(each, wanted) for each in s)), [])

    def _has_too_many(self) -> bool:
        """A single trace is bounded by itself."""
        return self._spans > self._most_spans and len(self._traces) > 1


def _trace_id(wanted: str) -> int:
    """0, which no trace has, where it cannot be one."""
    digits = wanted.lower()
    return int(digits, 16) if len(digits) == 32 and _HEX.issuperset(digits) else 0


def _is(span: ReadableSpan, wanted: str) -> bool:
    attributes = span.attributes or {}
    return any(attributes.get(name) == wanted for name in _ASKED_FOR)
