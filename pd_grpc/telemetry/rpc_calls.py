"""The calls that an instance serves and makes: a span and a duration of each.

By OpenTelemetry's conventions for RPC. A call belongs to the trace that its metadata names. One
that names none begins a trace where it is a request's, and has no span otherwise: of heartbeats,
health checks and look-ups nobody asks why they were slow. All have a duration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import Histogram
from opentelemetry.trace import Span, SpanKind
from opentelemetry.util.types import AttributeValue

from pd_grpc.telemetry import names
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.tracing import Tracing, extract, inject

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None
ReasonIn = Callable[[Metadata], str]
"""The reason that a call's trailing metadata gives for its failure; "" when there is none."""

REQUEST_METHODS = frozenset(
    {
        "pd_grpc.v1.InferenceService/Generate",
        "pd_grpc.v1.PrefillService/Prefill",
        "pd_grpc.v1.DecodeService/Allocate",
        "pd_grpc.v1.DecodeService/SendFirstToken",
        "pd_grpc.v1.DecodeService/Release",
        "pd_grpc.v1.TransferService/Transfer",
    }
)
"""Methods whose every call is about one request."""

MOST_PEERS = 256
"""Peers that durations tell apart."""
MOST_REMEMBERED = 1024
"""Methods and peers whose attributes are made but once."""

OK = grpc.StatusCode.OK.name
_SERVERS_FAULT = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""What marks the span of a server as failed; the rest is for the caller to judge. From the
conventions for gRPC."""


class Call:
    """One call. To be ended once; what comes later is nothing."""

    def __init__(
        self,
        calls: Calls,
        span: Span | None,
        about: Mapping[str, AttributeValue],
        duration: Histogram,
        failing: frozenset[str] | None,
        began: float,
    ) -> None:
        self._calls = calls
        self._span = span
        self._about = about
        self._duration = duration
        self._failing = failing
        self._began = began
        self._ended = False

    def ended(self, code: str, trailing: Metadata = None) -> None:
        """Its status came, or it was cancelled."""
        with self._calls.lock:
            # A handler and the end of its call may both tell, each on its own thread.
            if self._ended:
                return
            self._ended = True
        now = self._calls.now()
        about = {**self._calls.labels(self._about, code), names.ATTR_STATUS_CODE: code}
        failed = code != OK and (self._failing is None or code in self._failing)
        if failed:
            about[names.ATTR_ERROR_TYPE] = code
        self._duration.record(now - self._began, about)
        span = self._span
        if span is None or not span.is_recording():
            return
        outcome = "ok" if code == OK else self._calls.reason_in(trailing) or code
        if failed:
            # By the conventions the type is the code, as that of the duration.
            self._calls.tracing.end(span, at=now, error=(code, outcome), error_type=code)
        else:
            span.set_attribute(names.ATTR_STATUS_CODE, code)
            self._calls.tracing.end(span, at=now, outcome=outcome)


class Calls:
    """Of one instance. Safe from any thread."""

    def __init__(self, tracing: Tracing, instruments: Instruments, reason_in: ReasonIn) -> None:
        self.tracing = tracing
        self.reason_in = reason_in
        self.now = tracing.now
        self.lock = threading.Lock()
        self._made = instruments.histogram(names.METRIC_RPC_CLIENT_DURATION)
        self._served = instruments.histogram(names.METRIC_RPC_SERVER_DURATION)
        self._abouts: dict[tuple[str, str], Mapping[str, AttributeValue]] = {}
        self._answering: set[tuple[AttributeValue, AttributeValue]] = set()

    def made(
        self, method: str, endpoint: str, metadata: Metadata
    ) -> tuple[Call, list[tuple[str, Any]] | Metadata]:
        """A call is about to be made to `endpoint`; with the metadata that it is to carry, so that
        the span of who serves it is the child of this one."""
        about, span, now = self._about(method, endpoint), None, self.now()
        if self.tracing.records:
            parent = extract(metadata)
            if method in REQUEST_METHODS or _is_traced(parent):
                span = self.tracing.start(
                    method, parent=parent, at=now, kind=SpanKind.CLIENT, attributes=about
                )
                if span is not trace.get_current_span(parent):
                    metadata = inject(self.tracing.context(span), metadata or ())
        return Call(self, span, about, self._made, None, now), metadata

    def served(self, method: str, metadata: Metadata) -> tuple[Call, Context]:
        """A call came; with what is to be the parent of whatever it does."""
        about, span, now = self._about(method, ""), None, self.now()
        context = extract(metadata)
        if self.tracing.records and (method in REQUEST_METHODS or _is_traced(context)):
            span = self.tracing.start(
                method, parent=context, at=now, kind=SpanKind.SERVER, attributes=about
            )
            if span is not trace.get_current_span(context):
                context = self.tracing.context(span)
        return Call(self, span, about, self._served, _SERVERS_FAULT, now), context

    def labels(
        self, about: Mapping[str, AttributeValue], code: str
    ) -> Mapping[str, AttributeValue]:
        """Of the duration of a call that ended with `code`: with the peer if it has ever answered.
        Whoever sends a request may name a peer, and a series stays for good."""
        address, port = about.get(names.ATTR_SERVER_ADDRESS), about.get(names.ATTR_SERVER_PORT)
        if address is None or (address, port) in self._answering:
            return about
        if code == OK and len(self._answering) < MOST_PEERS:
            self._answering.add((address, port))
            return about
        return {key: about[key] for key in (names.ATTR_RPC_SYSTEM, names.ATTR_RPC_METHOD)}

    def _about(self, method: str, endpoint: str) -> Mapping[str, AttributeValue]:
        """Made once for a method and a peer, of so many."""
        found = self._abouts.get((method, endpoint))
        if found is None:
            if len(self._abouts) >= MOST_REMEMBERED:
                self._abouts.clear()
            found = {names.ATTR_RPC_SYSTEM: "grpc", names.ATTR_RPC_METHOD: method}
            if endpoint:
                host, _, port = endpoint.rpartition(":")
                found |= {names.ATTR_SERVER_ADDRESS: host.strip("[]")}
                found |= {names.ATTR_SERVER_PORT: int(port)}
            self._abouts[method, endpoint] = found
        return found


def full_name(path: str | bytes) -> str:
    """`package.Service/Method` of a request's path, which begins with a slash."""
    text = path.decode() if isinstance(path, bytes) else path
    return text.removeprefix("/")


def _is_traced(context: Context) -> bool:
    return trace.get_current_span(context).get_span_context().is_valid
