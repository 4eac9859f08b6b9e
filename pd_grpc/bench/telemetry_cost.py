"""What one span costs where it is made, in one thread and with nothing else to do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

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


class Encoding(SpanExporter):
    """Encodes whole batches as the exporter over gRPC does, and sends nothing."""

    BATCH = 512
    """Spans that are encoded at once."""

    def __init__(self) -> None:
        self.encoded_bytes = 0
        self._encoder = SpanEncoder()
        self._batch: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._batch.extend(spans)
        if len(self._batch) >= self.BATCH:
            self.encoded_bytes += len(self._encoder.encode(self._batch))
            self._batch.clear()
        return SpanExportResult.SUCCESS


def ways(encoding: SpanExporter) -> dict[str, Tracing]:
    """What may become of a span, by name; that of `encoded` alone goes to `encoding`."""
    clock = SystemClock()
    always, never = ParentBased(ALWAYS_ON), ParentBased(ALWAYS_OFF)
    by_sdk = TracerProvider(always, shutdown_on_exit=False)
    return {
        "off": Tracing(clock, "p0", "prefill"),
        "sampled_out": Tracing(clock, "p0", "prefill", _provider(never)),
        "recorded_by_sdk": Tracing(clock, "p0", "prefill", by_sdk),
        "recorded": Tracing(clock, "p0", "prefill", _provider(always)),
        "kept": Tracing(clock, "p0", "prefill", None, 256),
        "encoded": Tracing(clock, "p0", "prefill", _provider(always, encoding)),
    }


def span_costs(spans: int = 2000) -> dict[str, float]:
    """Microseconds of CPU for one child span with the attributes of a stage, started and ended,
    by what becomes of it: the least of some rounds, in each of which the ways take turns."""
    tracings = ways(Encoding())
    taken: dict[str, list[float]] = {name: [] for name in tracings}
    for _ in range(_ROUNDS):
        for name, tracing in tracings.items():
            taken[name].append(_per_span_us(tracing, spans))
    return {name: min(each) for name, each in taken.items()}


def _provider(sampler: ParentBased, exporter: SpanExporter | None = None) -> TracerProvider:
    provider = QuickProvider(shutdown_on_exit=False, sampler=sampler)
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def _per_span_us(tracing: Tracing, spans: int) -> float:
    begun = time.thread_time()
    for _ in range(spans // 8):
        root = tracing.start(names.SPAN_PREFILL_REQUEST, attributes=_ATTRIBUTES)
        parent = tracing.context(root)
        for _ in range(7):
            child = tracing.start(names.SPAN_QUEUE, parent=parent, attributes=_ATTRIBUTES)
            tracing.end(child)
        tracing.end(root)
    return (time.thread_time() - begun) / (spans // 8 * 8) * 1e6
