"""Where the time of a request went, from its spans: stages that adjoin, and the critical path.

Lengths are added up and never the beginnings of different instances compared, for no clock is
shared between machines. What is compared was told by one instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pd_grpc.telemetry import names

STAGES: Mapping[str, str] = {
    names.SPAN_ROUTE: "route",
    names.SPAN_QUEUE: "queue",
    names.SPAN_PREPARE: "prepare",
    names.SPAN_COMPUTE: "compute",
    names.SPAN_FIRST_TOKEN: "first_token",
}
"""Spans that follow one another up to the first token, and what their sums are called."""

_OURS = "pd."
_CONTINUATION = "continuation"


@dataclass(frozen=True)
class Moment:
    """Something that happened within a span, in seconds from its beginning."""

    name: str
    after_s: float
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """A span, as told by the instance whose work it is; `start_ns` is since 1970, by its clock."""

    span_id: str
    parent_id: str
    name: str
    instance: str
    start_ns: int
    duration_s: float
    outcome: str = "ok"
    attributes: Mapping[str, str] = field(default_factory=dict)
    moments: Sequence[Moment] = ()

    @property
    def ours(self) -> bool:
        """Whether it is a piece of a request's work, and not a call or somebody else's span."""
        return self.name.startswith(_OURS)

    @property
    def transfer_id(self) -> str:
        """The transfer that it is for; empty when it has none."""
        return self.attributes.get(names.ATTR_TRANSFER_ID, "")

    @property
    def attempt(self) -> int:
        """The attempt of the transfer; 0 when it has none."""
        told = self.attributes.get(names.ATTR_ATTEMPT, "")
        return int(told) if told.isascii() and told.isdecimal() else 0

    def after_s(self, name: str) -> float | None:
        """When something first happened within it, in seconds from its beginning."""
        return next((moment.after_s for moment in self.moments if moment.name == name), None)


@dataclass(frozen=True)
class Partition:
    """One request. Seconds; `stages` and `behind` have all their names, 0.0 for what was not."""

    stages: Mapping[str, float]
    """Route, queue, prepare, compute and first token, of all attempts up to the first token."""
    to_first_s: float | None
    """What the router measured from the call to the first token; None without one."""
    behind: Mapping[str, float] | None
    """From the first token to the second: the exposed part of sending KV, the wait for a step, and
    the step; None when D had no step for it, or nobody knows of one."""
    to_second_s: float | None
    """What the router measured from the first token to the second; None without one."""
    critical: tuple[Work, ...]
    """What the answer waited for, in order. An attempt that failed was waited for too."""

    @property
    def between_s(self) -> float | None:
        """What of the time to first token belongs to no stage: the calls' own ways."""
        return None if self.to_first_s is None else self.to_first_s - sum(self.stages.values())

    @property
    def between_second_s(self) -> float | None:
        """The same from the first token to the second."""
        if self.to_second_s is None or self.behind is None:
            return None
        return self.to_second_s - sum(self.behind.values())


def requests(spans: Iterable[Work]) -> list[list[Work]]:
    """The spans of one trace by request: a caller may make many in one. Calls and the steps of an
    engine are left out; a request that no router is known of is told by its transfer. Each choice
    of a request for several is one, beside the request itself."""
    spans = list(spans)
    known = {span.span_id: span for span in spans}
    of_transfer = {
        span.transfer_id: span.span_id
        for span in spans
        if span.name in names.ROUTERS_OWN and span.transfer_id
    }
    found: dict[str, list[Work]] = {}
    for span in spans:
        if span.ours and span.name != names.SPAN_STEP:
            root = _request_of(span, known) or of_transfer.get(span.transfer_id)
            found.setdefault(root or span.transfer_id, []).append(span)
    return list(found.values())


def whole_of(span: Work, known: Mapping[str, Work]) -> Work | None:
    """The nearest of our spans that it is a part of; None when none is known. The spans of calls
    and those of others lie in between."""
    seen = {span.span_id}
    above = known.get(span.parent_id)
    while above is not None and not above.ours and above.span_id not in seen:
        seen.add(above.span_id)
        above = known.get(above.parent_id)
    return above if above is not None and above.ours else None


def partition(spans: Iterable[Work]) -> Partition:
    """Of the spans of one request, in any order."""
    spans = list(spans)
    request = next((span for span in spans if span.name in names.ROUTERS_OWN), None)
    attempts = _attempts(spans)
    routes = [span for span in spans if span.name == names.SPAN_ROUTE]
    showing = _shows_first(request, attempts)
    critical = [*routes, *(span for attempt in attempts for span in attempt.path())]
    stages = dict.fromkeys(STAGES.values(), 0.0)
    until = 0 if showing is None else showing + 1
    before = [span for attempt in attempts[:until] for span in attempt.stages]
    for span in (*routes, *before):
        stages[STAGES[span.name]] += span.duration_s
    first = None if request is None else request.after_s(names.EVENT_FIRST_TOKEN)
    second = None if request is None else request.after_s(names.EVENT_SECOND_TOKEN)
    return Partition(
        stages,
        first,
        None if showing is None else attempts[showing].behind(),
        None if first is None or second is None else second - first,
        tuple(critical),
    )


class _Attempt:
    """The spans of one attempt, of P and D."""

    def __init__(self, number: int, spans: Sequence[Work]) -> None:
        self.number = number
        self.began_ns = min(span.start_ns for span in spans)
        # P's, or D's where it prefills itself: one instance's, so by its clock.
        self.stages = sorted((span for span in spans if span.name in STAGES), key=_in_turn)
        self._spans = spans

    def path(self) -> list[Work]:
        """What was waited for, in order."""
        found = list(self.stages)
        if self._tail_s() > 0 and (send := self._last(names.SPAN_SEND)) is not None:
            found.append(send)
        for name in (names.SPAN_STEP_WAIT, names.SPAN_DECODE):
            if (span := self._last(name)) is not None:
                found.append(span)
        return found

    def behind(self) -> dict[str, float] | None:
        """From its first token to its second."""
        decode, wait = self._last(names.SPAN_DECODE), self._last(names.SPAN_STEP_WAIT)
        if decode is None or wait is None:
            return None
        second = decode.after_s(names.EVENT_SECOND_TOKEN)
        if second is None and decode.outcome != "ok":
            return None
        # An answer of two tokens ends with its second. The first may leave when D decodes already.
        second_s = decode.duration_s if second is None else second
        first_s = decode.after_s(names.EVENT_FIRST_TOKEN) or 0.0
        return {
            "exposed_send": self._tail_s(),
            "step_wait": max(0.0, wait.duration_s - first_s),
            "step": second_s - max(wait.duration_s, first_s),
        }

    @property
    def decoded(self) -> bool:
        """Whether D decoded in it."""
        return self._last(names.SPAN_DECODE) is not None

    def _tail_s(self) -> float:
        """What of the KV came behind the first token: as D saw it, else as P did."""
        if (receive := self._last(names.SPAN_RECEIVE)) is not None:
            first = receive.after_s(names.EVENT_FIRST_TOKEN)
            return 0.0 if first is None else max(0.0, receive.duration_s - first)
        send, first_token = self._last(names.SPAN_SEND), self._last(names.SPAN_FIRST_TOKEN)
        if send is None or first_token is None:
            return 0.0
        return max(0.0, _end_ns(send) - _end_ns(first_token)) / 1e9

    def _last(self, name: str) -> Work | None:
        return max((s for s in self._spans if s.name == name), key=_end_ns, default=None)


def _attempts(spans: Iterable[Work]) -> list[_Attempt]:
    """Those a P or a D knows of, in order. A D that prefills itself numbers each from 1: only then
    does the order hang on two clocks, and no sum does."""
    found: dict[tuple[int, str], list[Work]] = {}
    for span in spans:
        if span.attempt and span.name not in (*names.ROUTERS_OWN, names.SPAN_ROUTE):
            found.setdefault((span.attempt, span.transfer_id), []).append(span)
    attempts = [_Attempt(number, each) for (number, _), each in found.items()]
    return sorted(attempts, key=lambda attempt: (attempt.number, attempt.began_ns))


def _shows_first(request: Work | None, attempts: Sequence[_Attempt]) -> int | None:
    """Which attempt brought the first token, or was to: the last that was not a continuation. None
    when nothing is known of it, for its instances are gone."""
    if request is None:
        decoded = (n for n, attempt in enumerate(attempts) if attempt.decoded)
        return next(decoded, len(attempts) - 1 if attempts else None)
    recoveries = [moment for moment in request.moments if moment.name == names.EVENT_RECOVERY]
    went_on = [m.attributes.get(names.ATTR_RECOVERY) == _CONTINUATION for m in recoveries]
    # Each recovery begins an attempt, the first of them the second.
    tries = went_on.index(True) + 1 if True in went_on else len(recoveries) + 1
    if len({attempt.number for attempt in attempts}) == len(attempts):
        known = [n for n, attempt in enumerate(attempts) if attempt.number <= tries]
    else:
        known = list(range(min(tries, len(attempts))))
    return known[-1] if known else None


def _request_of(span: Work, known: Mapping[str, Work]) -> str | None:
    """The id of the router's span that it lies under, if it is known."""
    seen: set[str] = set()
    at: Work | None = span
    while at is not None and at.span_id not in seen:
        if at.name in names.ROUTERS_OWN:
            return at.span_id
        seen.add(at.span_id)
        at = known.get(at.parent_id)
    return None


def _in_turn(span: Work) -> tuple[int, int]:
    return span.start_ns, _end_ns(span)


def _end_ns(span: Work) -> int:
    return span.start_ns + round(span.duration_s * 1e9)
