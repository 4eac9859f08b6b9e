"""Where spans and metrics of a server's process go: an OTLP collector, a Prometheus endpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from pd_grpc.telemetry import otlp as sending
from pd_grpc.telemetry.quick_spans import QuickProvider

STOP_S = 3.0
"""How long a stop waits for a collector to take what is left."""

_METRICS_EXPORTER = "OTEL_METRICS_EXPORTER"

Closer = Callable[[], object]


@dataclass(frozen=True)
class Telemetry:
    """The providers of one process; None is one that goes nowhere."""

    tracers: TracerProvider | None = None
    meters: MeterProvider | None = None
    prometheus: str = ""
    """host:port at which Prometheus is answered; empty when it is not."""
    closers: tuple[Closer, ...] = field(default=())
    """What ends exporting, after what is left; at the same time."""
    stoppers: tuple[Closer, ...] = field(default=())
    """What says that only what is left is exported from now on."""
    leavers: tuple[Closer, ...] = field(default=())
    """What ends exporting at once."""

    def shutdown(self) -> None:
        """Export what is left, for `STOP_S` at most and not to a collector that is away, and stop.
        Blocks: not for a loop."""
        if not self.closers:
            return
        for stop in self.stoppers:
            stop()
        late = threading.Timer(STOP_S, self._leave)
        late.start()
        try:
            with ThreadPoolExecutor(len(self.closers), "pd-telemetry") as pool:
                for closing in [pool.submit(close) for close in self.closers]:
                    closing.result()
        finally:
            late.cancel()
            self._leave()

    def _leave(self) -> None:
        for leave in self.leavers:
            leave()


def make_telemetry(service: str, instance: str, otlp: str, prometheus: str) -> Telemetry:
    """Export to the collector at `otlp` (host:port, gRPC), and answer Prometheus at `prometheus`
    (host:port, 0 is any free port); "" is off.

    Sampling follows the caller's decision and OpenTelemetry's own OTEL_TRACES_SAMPLER, the queue of
    spans OTEL_BSP_MAX_QUEUE_SIZE, the period of metrics OTEL_METRIC_EXPORT_INTERVAL; a collector of
    traces alone is sent no metrics with OTEL_METRICS_EXPORTER=none. A collector that cannot be
    reached is one line in the log for each signal, and so is its return; what it misses is dropped.
    RuntimeError names the extra to install when an exporter is missing, and the variable of
    OpenTelemetry that it cannot use; OSError when Prometheus's port cannot be had.
    """
    named = os.environ.get("OTEL_SERVICE_NAME") or service
    about = {"service.name": named, "service.version": version("pd-grpc")}
    resource = Resource.create({**about, "service.instance.id": instance})
    readers: list[MetricReader] = []
    closers: list[Closer] = []
    stoppers: list[Closer] = []
    leavers: list[Closer] = []
    tracers = None
    answering = ""
    if prometheus:
        reader, answering, close = _prometheus_reader(prometheus)
        readers.append(reader)
        closers.append(close)
    if otlp:
        try:
            spans, metrics = _exporters(otlp, instance)
            tracers = QuickProvider(resource)
            tracers.add_span_processor(BatchSpanProcessor(spans))
            if os.environ.get(_METRICS_EXPORTER) != "none":
                readers.append(PeriodicExportingMetricReader(metrics))
        except ValueError as error:
            given = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
            raise RuntimeError(f"one of {given} cannot be used: {error}") from error
        closers.append(tracers.shutdown)
        stoppers += [spans.stop, metrics.stop]
        leavers += [spans.shutdown, metrics.shutdown, sending.quiet(spans)]
    meters = MeterProvider(readers, resource=resource) if readers else None
    if meters is not None:
        closers.append(meters.shutdown)
    return Telemetry(tracers, meters, answering, tuple(closers), tuple(stoppers), tuple(leavers))


def _exporters(otlp: str, instance: str) -> tuple[sending.WatchedSpans, sending.WatchedMetrics]:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.exporter import (
            InvalidCompressionValueException,
        )
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        from pd_grpc.telemetry.span_encoding import FastSpanExporter
    except ImportError as error:
        raise RuntimeError(_missing(f"sending spans to {otlp}", "otlp")) from error
    try:
        spans = FastSpanExporter(otlp, sending.ATTEMPT_S)
        metrics = OTLPMetricExporter(endpoint=otlp, insecure=True, timeout=sending.ATTEMPT_S)
    except InvalidCompressionValueException as error:
        raise ValueError(str(error)) from error
    return (
        sending.WatchedSpans(spans, sending.Reach("spans", otlp, instance)),
        sending.WatchedMetrics(metrics, sending.Reach("metrics", otlp, instance)),
    )


def _prometheus_reader(endpoint: str) -> tuple[MetricReader, str, Closer]:
    try:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise RuntimeError(_missing(f"answering Prometheus at {endpoint}", "prometheus")) from error
    host, _, port = endpoint.rpartition(":")
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry)
    server, thread = start_http_server(int(port), host.strip("[]"), registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return reader, f"{host}:{server.server_port}", close


def _missing(what: str, extra: str) -> str:
    return f"{what} needs an exporter: pip install 'pd-grpc[{extra}]'"
