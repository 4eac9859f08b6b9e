"""What the clocks of instances on several machines are apart by, as far as a trace shows it.

Work that one instance did for another lies within what the other waited for. Where that holds, the
clocks are believed; else the work is drawn in the middle of the wait. For drawing alone: no sum
depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pd_grpc.telemetry import names
from pd_grpc.telemetry.partition import Work, whole_of

_LIE_WITHIN = frozenset({names.SPAN_PREFILL_REQUEST, names.SPAN_RESERVE, names.SPAN_DECODE})
"""Beside calls: these end before that which they are a part of does."""
_NEAR_NS = 20_000_000
"""An answer may be read before who gave it has noted its end, by so much on a busy machine."""

Bounds = tuple[int, int]


def skews_ns(works: Iterable[Work]) -> Mapping[str, int]:
    """What to add to the beginnings of each instance's spans, in ns; 0 for the one that the trace
    begins at and for those whose clock agrees with it."""
    works = list(works)
    known = {work.span_id: work for work in works}
    pairs = [(work, wait) for work in works if (wait := _wait_for(work, known)) is not None]
    found: dict[str, int] = {}
    if works:
        callers = {wait.instance for _, wait in pairs} - {work.instance for work, _ in pairs}
        first = min(works, key=lambda work: (work.instance not in callers, work.start_ns))
        found[first.instance] = 0
    while (placed := _next(pairs, found)) is not None:
        instance, bounds = placed
        found[instance] = _within(bounds)
    return {work.instance: found.get(work.instance, 0) for work in works}


def _wait_for(work: Work, known: Mapping[str, Work]) -> Work | None:
    """What of another instance waited for it and for nothing else; None when that is not known."""
    if work.name in _LIE_WITHIN:
        wait = whole_of(work, known)
    else:
        wait = known.get(work.parent_id)
        if work.ours or wait is None or wait.name != work.name:
            return None
    if wait is None or wait.instance == work.instance:
        return None
    # One that gave up before the work ended shows nothing.
    return wait if _length_ns(work) <= _length_ns(wait) + _NEAR_NS else None


def _next(
    pairs: Iterable[tuple[Work, Work]], found: Mapping[str, int]
) -> tuple[str, Bounds] | None:
    """Of the instances that worked for one whose clock has been placed, that of which most is
    known, and between what its own must be moved."""
    bounds: dict[str, Bounds] = {}
    for work, wait in pairs:
        if work.instance in found or wait.instance not in found:
            continue
        since = wait.start_ns + found[wait.instance]
        low, high = since - work.start_ns, since + _length_ns(wait) - work.start_ns
        high -= _length_ns(work)
        lowest, highest = bounds.get(work.instance, (low, high))
        bounds[work.instance] = max(low, lowest), min(high, highest)
    return min(bounds.items(), key=lambda each: each[1][1] - each[1][0], default=None)


def _within(bounds: Bounds) -> int:
    low, high = bounds
    agrees = low - _NEAR_NS <= 0 <= high + _NEAR_NS
    return 0 if agrees else (low + high) // 2


def _length_ns(work: Work) -> int:
    return round(work.duration_s * 1e9)
