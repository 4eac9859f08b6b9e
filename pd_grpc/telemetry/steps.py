"""`pd.step`: the batches of one engine, each linked to the requests that it serves."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.trace import Span

from pd_grpc.telemetry import names
from pd_grpc.telemetry.tracing import Tracing


class StepSpans:
    """A span for each step that serves a request which is recorded, in a trace of its own; an
    engine has one step at a time."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._step: Span | None = None

    def began(self, serves: Iterable[Span | None], batch: int, tokens: int, at: float) -> None:
        """A batch of `batch` requests enters the engine with `tokens` tokens; `serves` is what each
        request is about, None for one that has ended."""
        links = [s.get_span_context() for s in serves if s is not None and s.is_recording()]
        if links:
            about = {names.ATTR_BATCH: batch, names.ATTR_TOKENS: tokens}
            self._step = self._tracing.start(names.SPAN_STEP, at=at, attributes=about, links=links)

    def ended(self, at: float, error: tuple[str, str] | None) -> None:
        """It came back; or failed, with code and reason."""
        if self._step is not None:
            self._tracing.end(self._step, at=at, error=error)
            self._step = None
