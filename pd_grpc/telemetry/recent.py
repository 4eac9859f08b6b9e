"""The last traces of one instance, in memory: what an operator can read without any backend."""

from __future__ import annotations

import threading
from collections import OrderedDict

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import format_trace_id

from pd_grpc.telemetry import names

MOST_SPANS = 256
"""Spans kept of one trace; a caller may send all its requests in one."""

NOT_KEPT = frozenset({names.SPAN_STEP})
_ASKED_FOR = (names.ATTR_TRANSFER_ID, names.ATTR_REQUEST_ID)


class RecentTraces:
    """Keeps the spans of the last `traces` traces that an instance took part in. Safe from any
    thread. The steps of an engine belong to many requests and are not kept."""

    def __init__(self, traces: int) -> None:
        self._most = traces
        self._lock = threading.Lock()
        self._traces: OrderedDict[int, list[ReadableSpan]] = OrderedDict()

    def keep(self, span: ReadableSpan) -> None:
        """Keep a span that has ended."""
        context = span.get_span_context()
        if context is None or span.name in NOT_KEPT:
            return
        with self._lock:
            spans = self._traces.setdefault(context.trace_id, [])
            self._traces.move_to_end(context.trace_id)
            if len(spans) < MOST_SPANS:
                spans.append(span)
            while len(self._traces) > self._most:
                self._traces.popitem(last=False)

    def find(self, wanted: str) -> list[ReadableSpan]:
        """The spans of a trace by its id in hex digits, or of the newest trace of a request or
        transfer by its id; none when it is not known."""
        with self._lock:
            held = [(trace, list(spans)) for trace, spans in self._traces.items()]
        for trace, spans in reversed(held):
            if format_trace_id(trace) == wanted.lower() or any(_is(each, wanted) for each in spans):
                return spans
        return []


def _is(span: ReadableSpan, wanted: str) -> bool:
    attributes = span.attributes or {}
    return any(attributes.get(name) == wanted for name in _ASKED_FOR)
