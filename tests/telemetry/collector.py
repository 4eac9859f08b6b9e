"""An OTLP collector over gRPC that can be slow, full or away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Keeps what it is sent. Listens between `start` and `stop`, at the same port each time."""

    def __init__(self) -> None:
        self.spans = _Taker(trace_service_pb2.ExportTraceServiceResponse)
        self.metrics = _Taker(metrics_service_pb2.ExportMetricsServiceResponse)
        self._server: grpc.Server | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        """host:port, once it has listened."""
        return f"127.0.0.1:{self._port}"

    def answers(self, after_s: float = 0.0, code: grpc.StatusCode | None = None) -> None:
        """From now on everything is answered so late, and with this error."""
        for taker in (self.spans, self.metrics):
            taker.after_s, taker.code = after_s, code

    def all_spans(self) -> list[Span]:
        """What it took, each span once."""
        return [
            span
            for request in list(self.spans.taken)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def start(self) -> None:
        """Listen."""
        server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self.spans, server
        )
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self.metrics, server
        )
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        self._leaving(False)
        server.start()
        self._server = server

    def stop(self) -> None:
        """Be away: calls under way end with an error, new ones find nobody."""
        if self._server is not None:
            self._leaving(True)
            self._server.stop(None).wait(60)
            self._server = None

    def _leaving(self, leaving: bool) -> None:
        for taker in (self.spans, self.metrics):
            (taker.leaving.set if leaving else taker.leaving.clear)()

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class _Taker:
    """Serves the one method of one signal's service."""

    def __init__(self, answer: type[Any]) -> None:
        self.taken: list[Any] = []
        self.asked = 0
        self.after_s = 0.0
        self.code: grpc.StatusCode | None = None
        self.leaving = threading.Event()
        self._answer = answer

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.asked += 1
        self.leaving.wait(self.after_s)
        if self.code is not None:
            context.abort(self.code, "no more room")
        self.taken.append(request)
        return self._answer()


@contextmanager
def mute_port() -> Iterator[str]:
    """host:port where connections are accepted and nothing is ever said."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def deaf_port() -> Iterator[str]:
    """host:port where nobody listens, and nobody else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"
