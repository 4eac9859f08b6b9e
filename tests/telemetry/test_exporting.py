"""Spans and metrics leave the process: to a collector, to Prometheus, or nowhere without harm."""

from __future__ import annotations

import builtins
import socket
import urllib.request
from typing import Any

import pytest

from pd_grpc.cli.settings import SettingsError, load_settings
from pd_grpc.protocol.clock import ManualClock
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.telemetry import names
from pd_grpc.telemetry.exporting import Telemetry, make_telemetry
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.tracing import Tracing
from tests.cli.running import pd_grpc
from tests.telemetry.collector import Collector


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_nowhere_to_go_means_no_providers() -> None:
    assert make_telemetry("pd-grpc", "p0", "", "") == Telemetry()


@pytest.mark.parametrize(
    ("extra", "where"),
    [("otlp", ("127.0.0.1:4317", "")), ("prometheus", ("", "127.0.0.1:9464"))],
)
def test_a_missing_exporter_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, extra: str, where: tuple[str, str]
) -> None:
    real = builtins.__import__

    def without_exporters(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_exporters)
    with pytest.raises(RuntimeError, match=rf"pd-grpc\[{extra}\]"):
        make_telemetry("pd-grpc", "p0", *where)


def test_spans_and_metrics_reach_a_collector_with_the_name_of_the_instance() -> None:
    with Collector() as collector:
        telemetry = make_telemetry("pd-grpc-prefill", "p0", collector.endpoint, "")
        tracing = Tracing(ManualClock(), "p0", "prefill", telemetry.tracers)
        tracing.end(tracing.start(names.SPAN_QUEUE))
        Instruments("d0", telemetry.meters).counter(names.METRIC_REFUSALS).add(
            2, {"reason": "NO_BLOCKS"}
        )
        telemetry.shutdown()
    (sent,) = collector.spans.taken[0].resource_spans
    (measured,) = collector.metrics.taken[-1].resource_metrics
    for each in (sent, measured):
        resource = {a.key: a.value.string_value for a in each.resource.attributes}
        assert resource["service.name"] == "pd-grpc-prefill"
        assert resource["service.instance.id"] == "p0"
    assert [span.name for span in sent.scope_spans[0].spans] == ["pd.queue"]
    (metric,) = measured.scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("pd.refusals", "{call}")
    assert metric.sum.data_points[0].as_int == 2


MALFORMED = ("foo", "127.0.0.1", ":4317", "http://127.0.0.1:4317", "h:70000", "[::1:4317", "a b:1")


@pytest.mark.parametrize("field", ["otlp", "prometheus"])
@pytest.mark.parametrize("value", MALFORMED)
def test_a_malformed_endpoint_is_refused_with_the_name_of_its_field(field: str, value: str) -> None:
    for argv, environ in ([f"--{field}", value], {}), ([], {f"PD_{field.upper()}": value}):
        with pytest.raises(SettingsError, match=rf"^{field} must .*, not '"):
            load_settings(RouterConfig, argv, environ)


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100", "max_export_batch_size must be less"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-1", "needs to be larger than zero"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "soon", "could not convert"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "none at all", "compression"),
    ],
)
def test_a_variable_of_opentelemetry_that_cannot_be_used_is_said_in_one_line(
    variable: str, value: str, why: str
) -> None:
    done = pd_grpc("serve", "router", "--otlp", "127.0.0.1:4317", environ={variable: value})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("pd-grpc serve router: one of ")
    assert variable in line and why in line


def test_a_collector_of_traces_alone_is_sent_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with Collector() as collector:
        telemetry = make_telemetry("pd-grpc-prefill", "p0", collector.endpoint, "")
        tracing = Tracing(ManualClock(), "p0", "prefill", telemetry.tracers)
        tracing.end(tracing.start(names.SPAN_QUEUE))
        telemetry.shutdown()
    assert [span.name for span in collector.all_spans()] == ["pd.queue"]
    assert collector.metrics.asked == 0


def test_prometheus_is_answered_until_the_end() -> None:
    where = f"127.0.0.1:{free_port()}"
    telemetry = make_telemetry("pd-grpc-decode", "d0", "", where)
    instruments = Instruments("d0", telemetry.meters)
    instruments.histogram(names.METRIC_STAGE_DURATION).record(
        0.02, {"stage": "decode", "pd.outcome": "ok"}
    )
    with urllib.request.urlopen(f"http://{where}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert "pd_stage_duration_seconds_bucket{" in text
    (line,) = [x for x in text.splitlines() if x.startswith("pd_stage_duration_seconds_count")]
    assert 'stage="decode"' in line and line.endswith(" 1.0")
    assert 'service_instance_id="d0"' in text
    telemetry.shutdown()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{where}/metrics", timeout=60)


def test_port_0_is_any_free_one_and_says_which() -> None:
    telemetry = make_telemetry("pd-grpc-decode", "d0", "", "127.0.0.1:0")
    try:
        assert not telemetry.prometheus.endswith(":0")
        url = f"http://{telemetry.prometheus}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.status == 200
    finally:
        telemetry.shutdown()


def test_a_port_that_is_taken_is_an_error_at_the_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError):
            make_telemetry("pd-grpc", "d0", "", f"127.0.0.1:{taken.getsockname()[1]}")
