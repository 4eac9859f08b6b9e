"""Where spans and metrics of a server's process go: an OTLP collector, a Prometheus endpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

_EXPORTERS = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_SIGNALS = ("traces", "metrics")
_EXPORT_S = 3.0
"""How long one batch is tried, and so how long a stop may wait for a collector that is away."""


@dataclass(frozen=True)
class Telemetry:
    """The providers of one process; None is one that goes nowhere."""

    tracers: TracerProvider | None = None
    meters: MeterProvider | None = None
    prometheus: str = ""
    """host:port at which Prometheus is answered; empty when it is not."""
    closers: tuple[Callable[[], object], ...] = field(default=())

    def shutdown(self) -> None:
        """Export what is left and stop. Blocks while the collector is slow: not for a loop."""
        for close in self.closers:
            close()


def make_telemetry(service: str, instance: str, otlp: str, prometheus: str) -> Telemetry:
    """Export to the collector at `otlp` (host:port, gRPC), and answer Prometheus at `prometheus`
    (host:port, 0 is any free port); "" is off.

    Sampling follows the caller's decision and OpenTelemetry's own OTEL_TRACES_SAMPLER, the period
    of metrics OTEL_METRIC_EXPORT_INTERVAL. A collector that cannot be reached is one line in the
    log, and what it misses is dropped. RuntimeError names the extra to install when an exporter is
    missing; OSError when Prometheus's port cannot be had.
    """
    resource = Resource.create({"service.name": service, "service.instance.id": instance})
    readers: list[MetricReader] = []
    closers: list[Callable[[], object]] = []
    tracers = None
    answering = ""
    if otlp:
        tracers = TracerProvider(resource=resource)
        tracers.add_span_processor(BatchSpanProcessor(_span_exporter(otlp)))
        closers.append(tracers.shutdown)
        readers.append(_otlp_reader(otlp))
        logging.getLogger(_EXPORTERS).addFilter(_once_each())
    if prometheus:
        reader, answering, close = _prometheus_reader(prometheus)
        readers.append(reader)
        closers.append(close)
    meters = MeterProvider(readers, resource=resource) if readers else None
    if meters is not None:
        closers.insert(0, meters.shutdown)
    return Telemetry(tracers, meters, answering, tuple(closers))


def _span_exporter(otlp: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise RuntimeError(_missing(f"sending spans to {otlp}", "otlp")) from error
    return OTLPSpanExporter(endpoint=otlp, insecure=True, timeout=_EXPORT_S)


def _otlp_reader(otlp: str) -> MetricReader:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return PeriodicExportingMetricReader(
        OTLPMetricExporter(endpoint=otlp, insecure=True, timeout=_EXPORT_S)
    )


def _prometheus_reader(endpoint: str) -> tuple[MetricReader, str, Callable[[], None]]:
    try:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise RuntimeError(_missing(f"answering Prometheus at {endpoint}", "prometheus")) from error
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry)
    host, _, port = endpoint.rpartition(":")
    server, thread = start_http_server(int(port), host.strip("[]"), registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return reader, f"{host}:{server.server_port}", close


def _missing(what: str, extra: str) -> str:
    return f"{what} needs an exporter: pip install 'pd-grpc[{extra}]'"


def _once_each() -> Callable[[logging.LogRecord], bool]:
    """Lets one line for spans and one for metrics through: a collector that is away would have
    several for each batch."""
    said: set[str] = set()

    def fresh(record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        signal = next((str(each) for each in args if each in _SIGNALS), str(record.msg))
        if signal in said:
            return False
        said.add(signal)
        return True

    return fresh
