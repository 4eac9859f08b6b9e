"""A trace as bars: one line a span, below the span that it is a part of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from pd_grpc.cli.clock_skew import skews_ns
from pd_grpc.protocol.messages import seconds
from pd_grpc.protocol.span_messages import read_spans
from pd_grpc.telemetry import names
from pd_grpc.telemetry.partition import Work, partition, requests, whole_of
from pd_grpc.v1 import admin_pb2

_WIDTH = 44


class Row(NamedTuple):
    """A span's line; times in ms from the beginning of the first one shown. `critical` says whether
    the answer waited for it."""

    span: admin_pb2.Span
    depth: int
    start_ms: float
    length_ms: float
    critical: bool


def rows(spans: Sequence[admin_pb2.Span], calls: bool = False) -> list[Row]:
    """Every span once, the parts of one behind it in the order of their beginning; with `calls`
    those of the RPCs too. One whose whole is not known here stands at the left."""
    works = read_spans(spans)
    critical = {span.span_id for each in requests(works) for span in partition(each).critical}
    shown = [span for span, work in zip(spans, works, strict=True) if calls or work.ours]
    if not shown:
        return []
    skews = skews_ns(works)

    def start_ns(span: admin_pb2.Span) -> int:
        return span.start.ToNanoseconds() + skews[span.instance]

    began = min(map(start_ns, shown))
    parts = _parts(works, sorted(shown, key=start_ns), calls)

    def walk(whole: str, depth: int) -> Iterator[Row]:
        for span in parts.pop(whole, ()):
            at_ms = (start_ns(span) - began) / 1e6
            length_ms = seconds(span.duration) * 1000
            yield Row(span, depth, at_ms, length_ms, span.span_id in critical)
            yield from walk(span.span_id, depth + 1)

    return list(walk("", 0))


def span_tree(spans: Sequence[admin_pb2.Span], calls: bool = False) -> Text:
    """Lines with one bar per span, all on one time axis; `*` marks the critical path. No line ends
    with blanks."""
    lines = rows(spans, calls)
    end = max((row.start_ms + row.length_ms for row in lines), default=0.0) or 1.0
    labels = ["  " * row.depth + row.span.name for row in lines]
    name = max(map(len, ["span", *labels]))
    who = max(len(each) for each in ["of", *(row.span.instance for row in lines)])
    number = max(len(each) for each in ["ms", *(f"{row.length_ms:.1f}" for row in lines)])
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


def attempts(spans: Sequence[admin_pb2.Span]) -> list[str]:
    """A line for each attempt elsewhere, with what the one before had failed of, and one for those
    who had a part in it and of whom no span is known: who dies takes its own along."""
    found = []
    named: set[str] = set()
    for span in spans:
        if span.name not in names.ROUTERS_OWN:
            continue
        attributes = span.attributes
        named |= {attributes.get(name, "") for name in (names.ATTR_PREFILL, names.ATTR_DECODE)}
        for event in span.events:
            if event.name != names.EVENT_RECOVERY:
                continue
            told = event.attributes
            peer = told.get(names.ATTR_PEER, "")
            named.add(peer)
            found.append(
                f"attempt {told.get(names.ATTR_ATTEMPT)} ({told.get(names.ATTR_RECOVERY)}) after "
                f"{seconds(event.after) * 1000:.1f} ms: {told.get(names.ATTR_ERROR_TYPE)}"
                + (f" of {peer}" if peer else "")
            )
    if unknown := sorted(named - {span.instance for span in spans} - {""}):
        found.append(f"nothing is known here of the part of {', '.join(unknown)}")
    return found


def sums(spans: Sequence[admin_pb2.Span]) -> list[str]:
    """For each request of the trace, a line on what its first token and its second waited for.
    `between` is what belongs to no stage: what the calls themselves took."""
    found = []
    for each in requests(read_spans(spans)):
        told = partition(each)
        if told.to_first_s is not None:
            found.append(_sum("first token after", told.to_first_s, told.stages, told.between_s))
        if told.to_second_s is not None and told.behind is not None:
            between_s = told.between_second_s
            found.append(
                _sum("second token behind it by", told.to_second_s, told.behind, between_s)
            )
    return found


def _sum(what: str, whole_s: float, parts: Mapping[str, float], between_s: float | None) -> str:
    terms = [f"{name} {part_s * 1000:.1f}" for name, part_s in parts.items()]
    if between_s is not None:
        terms.append(f"between {between_s * 1000:.1f}")
    return f"{what} {whole_s * 1000:.1f} ms: {', '.join(terms)}"


def _parts(
    works: Sequence[Work], shown: Sequence[admin_pb2.Span], calls: bool
) -> dict[str, list[admin_pb2.Span]]:
    """What is shown, in its order, by the id of the span below which it stands."""
    known = {work.span_id: work for work in works}
    request_of = {w.transfer_id: w for w in works if w.name in names.ROUTERS_OWN and w.transfer_id}
    parts: dict[str, list[admin_pb2.Span]] = {}
    for span in shown:
        work = known[span.span_id]
        whole = known.get(work.parent_id) if calls else whole_of(work, known)
        if whole is None and work.name not in names.ROUTERS_OWN:
            # The calls between may not have been kept.
            whole = request_of.get(work.transfer_id)
        parts.setdefault("" if whole is None else whole.span_id, []).append(span)
    return parts
