"""Sending to an OTLP collector, which may be away, slow or full.

Spans wait in a bounded queue and metrics in none, a batch that a collector does not take is
dropped, and no request waits for it. What the exporters of OpenTelemetry log for each batch becomes
one line when a collector stops taking a signal, and one when it takes it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event

ATTEMPT_S = 3.0
"""How long one batch is tried, from its first attempt to its last."""

_EXPORTERS = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
_QUEUES = logging.getLogger("opentelemetry.sdk._shared_internal")


class Reach:
    """Whether the collector at `endpoint` takes one signal of `instance`, as its last batch went.
    One batch at a time, on whichever thread."""

    def __init__(self, signal: str, endpoint: str, instance: str) -> None:
        self._signal = signal
        self._endpoint = endpoint
        self._log = InstanceLog("telemetry.exporting", instance)
        self._away_since: float | None = None
        self._full = False
        self._told_full = False
        self._stopping = False

    def stop(self) -> None:
        """What is left is exported from now on: not to a collector that is known to be away."""
        self._stopping = True

    def attempt(self, export: Callable[[], bool]) -> bool:
        """Export a batch; whether it was taken."""
        if self._stopping and self._away_since is not None:
            return False
        _attempts.words = ""
        try:
            taken = export()
        finally:
            words, _attempts.words = _attempts.words, None
        if taken:
            self._taken()
        else:
            self._missed(words)
        return taken

    def full(self) -> None:
        """The queue is full; the batch under way will tell if the collector is slow or away."""
        self._full = True

    def drained(self) -> None:
        """The queue has been emptied."""
        self._full = self._told_full = False

    def _taken(self) -> None:
        if self._away_since is not None:
            away_s = time.monotonic() - self._away_since
            self._note(Event.COLLECTOR_BACK, "the collector takes %s again, after %.0f s", away_s)
            self._away_since = None
            # It is full of what came while nobody took it.
            self._full = False
        if self._full and not self._told_full:
            self._told_full = True
            text = "%s are dropped: the collector takes them more slowly than they are made"
            self._note(Event.COLLECTOR_SLOW, text)

    def _missed(self, words: str) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            text = "%s are dropped until the collector takes them: %s"
            if self._stopping:
                text = "the last %s are dropped: %s"
            words = words or "the exporter does not say why"
            self._note(Event.COLLECTOR_AWAY, text, words)

    def _note(self, event: Event, text: str, *args: object) -> None:
        self._log.note(event, text, self._signal, *args, peer=self._endpoint)


class WatchedSpans(SpanExporter):
    """Spans to a collector."""

    def __init__(self, exporter: SpanExporter, reach: Reach) -> None:
        self._exporter = exporter
        self._reach = reach
        self._largest = 0
        self._closing = _Once(exporter.shutdown)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; blocks for `ATTEMPT_S` at most."""
        ok = SpanExportResult.SUCCESS
        taken = self._reach.attempt(lambda: self._exporter.export(spans) is ok)
        self._largest = max(self._largest, len(spans))
        if taken and len(spans) < self._largest:
            # Behind a batch that is not a whole one nothing waits.
            self._reach.drained()
            _QUEUES.setLevel(logging.NOTSET)
        return ok if taken else SpanExportResult.FAILURE

    def stop(self) -> None:
        """Only what is left is exported from now on."""
        self._reach.stop()

    def shutdown(self) -> None:
        """Close the connection; a batch that is under way is given up."""
        self._closing()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing waits here."""
        return True

    def queue_full(self, record: logging.LogRecord) -> bool:
        """A filter of the queue's log: each span that it drops is a line there. After the first the
        log is asked no more, until the queue is empty again, for it is asked on the event loop."""
        if record.levelno > logging.WARNING:
            return True
        _QUEUES.setLevel(logging.ERROR)
        self._reach.full()
        return False


class WatchedMetrics(MetricExporter):
    """Metrics to a collector."""

    def __init__(self, exporter: MetricExporter, reach: Reach) -> None:
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter = exporter
        self._reach = reach
        self._closing = _Once(exporter.shutdown)

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> MetricExportResult:
        """Send what was measured; blocks for `ATTEMPT_S` at most."""
        ok = MetricExportResult.SUCCESS
        taken = self._reach.attempt(lambda: self._exporter.export(metrics_data) is ok)
        return ok if taken else MetricExportResult.FAILURE

    def stop(self) -> None:
        """Only what is left is exported from now on."""
        self._reach.stop()

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        """Close the connection; an export that is under way is given up."""
        self._closing()

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing waits here."""
        return True


def quiet(spans: WatchedSpans) -> Callable[[], None]:
    """Hear what OpenTelemetry's exporters and queues log in place of its being written; what is
    returned ends that."""
    # Ahead of OpenTelemetry's own filter, which withholds a line that is like the last.
    if _hear not in _EXPORTERS.filters:
        _EXPORTERS.filters.insert(0, _hear)
    _QUEUES.filters.insert(0, spans.queue_full)

    def end() -> None:
        _QUEUES.removeFilter(spans.queue_full)
        _QUEUES.setLevel(logging.NOTSET)

    return end


class _Attempts(threading.local):
    """What the exporter says of the batch that this thread tries; None between batches."""

    words: str | None = None


_attempts = _Attempts()


def _hear(record: logging.LogRecord) -> bool:
    """A filter: the last words on a batch of ours are kept and not written. Those of exporters of
    somebody else pass."""
    if _attempts.words is None:
        return True
    _attempts.words = record.getMessage()
    return False


class _Once:
    """Calls `act` the first time, from whichever thread."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._lock = threading.Lock()
        self._done = False

    def __call__(self) -> None:
        with self._lock:
            first, self._done = not self._done, True
        if first:
            self._act()
