"""A trace as bars: one line a span, below the span that it is a part of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from pd_grpc.protocol.messages import seconds
from pd_grpc.telemetry import names
from pd_grpc.v1 import admin_pb2

_WIDTH = 44
_CRITICAL = frozenset(
    {
        names.SPAN_ROUTE,
        names.SPAN_QUEUE,
        names.SPAN_PREPARE,
        names.SPAN_COMPUTE,
        names.SPAN_FIRST_TOKEN,
        names.SPAN_DECODE,
    }
)
"""They follow one another from the client's call to the last token; the others lie beside them."""


class Row(NamedTuple):
    """A span's line; times in ms from the beginning of the trace."""

    span: admin_pb2.Span
    depth: int
    start_ms: float
    length_ms: float

    @property
    def critical(self) -> bool:
        """Whether the answer would have come sooner without it."""
        return self.span.name in _CRITICAL


def rows(spans: Sequence[admin_pb2.Span]) -> list[Row]:
    """Every span once, the parts of one behind it in the order of their beginning. One whose whole
    is not known here stands at the left."""
    began = min(span.start.ToNanoseconds() for span in spans)
    known = {span.span_id for span in spans}
    parts: dict[str, list[admin_pb2.Span]] = {}
    for span in sorted(spans, key=lambda each: each.start.ToNanoseconds()):
        parts.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)

    def walk(whole: str, depth: int) -> Iterator[Row]:
        for span in parts.pop(whole, ()):
            at_ms = (span.start.ToNanoseconds() - began) / 1e6
            yield Row(span, depth, at_ms, seconds(span.duration) * 1000)
            yield from walk(span.span_id, depth + 1)

    return list(walk("", 0))


def span_tree(spans: Sequence[admin_pb2.Span]) -> Text:
    """Lines with one bar per span, all on one time axis; `*` marks the critical path. No line ends
    with blanks."""
    lines = rows(spans)
    end = max(row.start_ms + row.length_ms for row in lines) or 1.0
    labels = ["  " * row.depth + row.span.name for row in lines]
    name = max(map(len, labels))
    who = max(len(row.span.instance) for row in lines)
    number = max(*(len(f"{row.length_ms:.1f}") for row in lines), len("ms"))
    found = [Text(f"  {'span':<{name}}  {'of':<{who}}  {'ms':>{number}}", style="bold")]
    for label, row in zip(labels, lines, strict=True):
        mark = "*" if row.critical else " "
        text = f"{mark} {label:<{name}}  {row.span.instance:<{who}}  {row.length_ms:>{number}.1f}"
        line = Text(text)
        before = round(row.start_ms / end * _WIDTH)
        length = max(1, round(row.length_ms / end * _WIDTH))
        line.append(" " * (2 + min(before, _WIDTH - length)))
        failed = row.span.outcome not in ("", "ok")
        style = "red" if failed else "cyan" if row.critical else "dim"
        line.append("█" * length, style=style)
        if failed:
            line.append(f" {row.span.outcome}", style=style)
        found.append(line)
    return Text("\n", no_wrap=True).join(found)
