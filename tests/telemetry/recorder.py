"""Providers that keep spans and metrics in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Recorder:
    """Keeps its spans and metrics in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """What has ended."""
        return self._exporter.get_finished_spans()

    def span(self, name: str) -> ReadableSpan:
        """The one span of a name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def points(self, name: str) -> list[tuple[Mapping[str, Any], Any]]:
        """The labels and the value of each series of a metric."""
        data = self._reader.get_metrics_data()
        return [
            (point.attributes or {}, point)
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


def parent_of(span: ReadableSpan) -> int | None:
    """The id of what a span is a part of."""
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    """A span's id."""
    context = span.get_span_context()
    assert context is not None
    return context.span_id
