"""A collector that only keeps what it is sent: the far end of OTLP, as a process of the benchmark.

While a load runs it takes bytes and answers; what lies in them is read when it is asked, after the
load. It so uses as little of the machine as a receiver in Python can, and its CPU is told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pd_grpc.bench.statistics import percentile
from pd_grpc.telemetry import names

_TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
_LARGEST_BYTES = 64 << 20
_STOP_S = 5.0


class Sink:
    """One endpoint for each name in `listeners`, so that their spans are told apart."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._listeners = {name: _Listener() for name in spec["listeners"]}

    async def start(self) -> Mapping[str, Any]:
        return {
            "endpoints": {
                name: f"127.0.0.1:{listener.start()}" for name, listener in self._listeners.items()
            }
        }

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "take":
            return self._listeners[command["listener"]].take()
        if command["do"] == "look":
            return self._listeners[command["listener"]].look()
        raise ValueError(f"do: {command['do']!r} is nothing that a sink does")

    async def stop(self) -> None:
        for listener in self._listeners.values():
            listener.stop()


class _Listener(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs alone
    """Takes any OTLP export. An empty answer says that all of it was."""

    def __init__(self) -> None:
        self._spans: list[bytes] = []
        self._metrics: list[bytes] = []
        self._pool = ThreadPoolExecutor(4, "sink")
        self._server = grpc.server(
            self._pool,
            options=[("grpc.max_receive_message_length", _LARGEST_BYTES), ("grpc.so_reuseport", 0)],
        )
        self._server.add_generic_rpc_handlers((self,))

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        kept = {_TRACES: self._spans, _METRICS: self._metrics}.get(details.method)
        if kept is None:
            return None

        def export(request: bytes, context: grpc.ServicerContext) -> bytes:
            kept.append(request)
            return b""

        return grpc.unary_unary_rpc_method_handler(export)

    def start(self) -> int:
        """Its port."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return port

    def stop(self) -> None:
        self._server.stop(None).wait(_STOP_S)
        self._pool.shutdown()

    def take(self) -> dict[str, Any]:
        """What came since it was asked last."""
        traces, metrics = list(self._spans), list(self._metrics)
        del self._spans[: len(traces)], self._metrics[: len(metrics)]
        return _counted(traces, metrics)

    def look(self) -> dict[str, Any]:
        """What `take` would return. It stays."""
        return _counted(list(self._spans), list(self._metrics))


def _counted(traces: Sequence[bytes], metrics: Sequence[bytes]) -> dict[str, Any]:
    return {
        **count_spans(traces),
        "span_exports": len(traces),
        "span_bytes": sum(map(len, traces)),
        "metric_exports": len(metrics),
        "metric_bytes": sum(map(len, metrics)),
    }


def count_spans(exports: Sequence[bytes]) -> dict[str, Any]:
    """Spans in serialized exports: how many, how many by name, how many traces have a request, how
    many spans most of those have (the median), and how many are `missing` where such a trace has
    fewer: all requests of a load go the same way and leave alike many. The steps of an engine
    serve many requests and belong to none; a trace without its request is the end of one that was
    counted before."""
    by_name: Counter[str] = Counter()
    of_trace: Counter[bytes] = Counter()
    requests: set[bytes] = set()
    for export in exports:
        for resource in ExportTraceServiceRequest.FromString(export).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    by_name[span.name] += 1
                    of_trace[span.trace_id] += span.name != names.SPAN_STEP
                    if span.name == names.SPAN_REQUEST:
                        requests.add(span.trace_id)
    sizes = [of_trace[trace] for trace in requests]
    whole = percentile(sizes, 0.5) if sizes else 0
    return {
        "spans": by_name.total(),
        "by_name": dict(by_name),
        "traces": len(sizes),
        "spans_of_a_trace": whole,
        "missing": sum(max(0, whole - size) for size in sizes),
    }
