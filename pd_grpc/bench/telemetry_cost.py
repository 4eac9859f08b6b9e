"""What one span costs where it is made, in one thread and with nothing else to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.util.types import AttributeValue

from pd_grpc.protocol.clock import SystemClock
from pd_grpc.telemetry import names
from pd_grpc.telemetry.quick_spans import QuickProvider
from pd_grpc.telemetry.span_encoding import SpanEncoder
from pd_grpc.telemetry.tracing import Tracing

_ROUNDS = 7
_ATTRIBUTES: Mapping[str, AttributeValue] = {
    names.ATTR_TRANSFER_ID: "0af7651916cd43dd8448eb211c80319c",
    names.ATTR_ATTEMPT: 1,
}


class _Encoding(SpanExporter):
    """Encodes as the exporter over gRPC does, and sends nothing."""

    def __init__(self) -> None:
        self._encoder = SpanEncoder()
        self.batch: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batch.extend(spans)
        if len(self.batch) >= 512:
            self._encoder.encode(self.batch)
            self.batch.clear()
        return SpanExportResult.SUCCESS


def span_costs(spans: int = 2000) -> dict[str, float]:
    """Microseconds of CPU for one child span with the attributes of a stage, started and ended,
    by what becomes of it: the least of some rounds."""
    clock = SystemClock()
    ways: dict[str, Callable[[], Tracing]] = {
        "off": lambda: Tracing(clock, "p0", "prefill"),
        "sampled_out": lambda: Tracing(clock, "p0", "prefill", _provider(ParentBased(ALWAYS_OFF))),
        "recorded_by_sdk": lambda: Tracing(
            clock, "p0", "prefill", TracerProvider(ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        ),
        "recorded": lambda: Tracing(clock, "p0", "prefill", _provider(ParentBased(ALWAYS_ON))),
        "kept": lambda: Tracing(clock, "p0", "prefill", None, 256),
        "encoded": lambda: Tracing(
            clock, "p0", "prefill", _provider(ParentBased(ALWAYS_ON), _Encoding())
        ),
    }
    return {name: _per_span_us(make(), spans) for name, make in ways.items()}


def _provider(sampler: ParentBased, exporter: SpanExporter | None = None) -> TracerProvider:
    provider = QuickProvider(shutdown_on_exit=False, sampler=sampler)
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def _per_span_us(tracing: Tracing, spans: int) -> float:
    taken = []
    for _ in range(_ROUNDS):
        begun = time.thread_time()
        for _ in range(spans // 8):
            root = tracing.start(names.SPAN_PREFILL_REQUEST, attributes=_ATTRIBUTES)
            parent = tracing.context(root)
            for _ in range(7):
                child = tracing.start(names.SPAN_QUEUE, parent=parent, attributes=_ATTRIBUTES)
                tracing.end(child)
            tracing.end(root)
        taken.append((time.thread_time() - begun) / (spans // 8 * 8))
    return min(taken) * 1e6
