"""The prepare pool: which requests may ask their D for blocks now.

Each D has a window of its own inside a total, so that a D that is slow, full or silent holds its
own window only. None has more in flight than the total has left, so that many such Ds do not use it
up for the others.

Grants not yet computed are bounded too, so that D's blocks are not held idle: the Ds that have
granted some share `ahead` between them, and one whose grants pile up holds back nobody else.
Allocates that still wait do not count against that.

A D that has refused for want of room is not asked before its back-off is over; the requests for it
wait meanwhile. A D that is lost or silent is behind its breaker; nobody waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from pd_grpc.prefill.breaker import Breaker, BreakerState
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.timers import Timers


@dataclass(frozen=True)
class PrepareLimits:
    """The pool's knobs; see PrefillConfig for what each means."""

    window: int
    total: int
    ahead: int
    backoff_s: float
    backoff_max_s: float
    backoff_jitter: float
    breaker_open_s: float
    breaker_max_s: float

    @classmethod
    def of(cls, config: PrefillConfig) -> PrepareLimits:
        """As configured."""
        return cls(
            window=config.prepare_window,
            total=config.prepare_total,
            ahead=config.prepare_ahead or 2 * config.prefill_batch,
            backoff_s=config.backoff_s,
            backoff_max_s=config.backoff_max_s,
            backoff_jitter=config.backoff_jitter,
            breaker_open_s=config.breaker_open_s,
            breaker_max_s=config.breaker_max_s,
        )


@dataclass(frozen=True)
class LaneView:
    """One D as an operator sees it."""

    endpoint: str
    in_flight: int
    ready: int
    waiting: int
    backoff_left_s: float
    breaker: BreakerState
    breaker_left_s: float
    breaker_fault: Fault | None


class _Lane:
    """One D: the requests that wait, in order of arrival, those that ask, those that are granted;
    and whether it may be asked."""

    def __init__(self, breaker: Breaker) -> None:
        self.waiting: OrderedDict[TransferKey, int] = OrderedDict()
        self.asking: dict[TransferKey, int] = {}
        self.granted: set[TransferKey] = set()
        self.breaker = breaker
        self.probe: TransferKey | None = None
        self.backoff_until = 0.0
        self.refusal: Fault | None = None
        """Why it is in back-off, or was last."""

    @property
    def empty(self) -> bool:
        """Whether nothing is under way for this D."""
        return not (self.waiting or self.asking or self.granted)

    def backs_off(self, now: float) -> bool:
        """Whether it has asked for patience."""
        return now < self.backoff_until

    def is_open(self, now: float) -> bool:
        """Whether nobody may wait for it."""
        return self.breaker.state(now) is BreakerState.OPEN

    def forgettable(self, now: float, memory_s: float) -> bool:
        """Whether nothing is worth remembering of it."""
        if not self.empty or self.backs_off(now):
            return False
        return self.breaker.fault is None or now >= self.breaker.until + memory_s

    def forget(self, key: TransferKey) -> None:
        """A request is nowhere here any more, but for those that ask."""
        self.waiting.pop(key, None)
        self.granted.discard(key)
        if self.probe == key:
            self.probe = None


class PreparePool:
    """`window` Allocates per D and `total` in all may be in flight, for each D no more than the
    total has left; none starts for a D whose share of `ahead` is used up by grants not yet
    computed. `jitter` gives a number from 0 to 1 for each back-off. Times are seconds of one
    clock."""

    def __init__(self, limits: PrepareLimits, jitter: Callable[[], float] = lambda: 0.0) -> None:
        self.paused = False
        """While set nobody begins to ask; whoever asks already goes on."""
        self._limits = limits
        self._jitter = jitter
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[TransferKey, str] = {}
        self._asking = 0
        self._arrivals = count()
        self._ends: Timers[str] = Timers()
        """Of back-offs, by D."""
        self._held: set[str] = set()
        """Ds of which somebody who waits has yet to be told that they may not be asked."""

    @property
    def in_flight(self) -> int:
        """Allocates in flight."""
        return self._asking

    @property
    def granted(self) -> int:
        """Grants not yet computed."""
        return sum(len(lane.granted) for lane in list(self._lanes.values()))

    def waiting_for(self, endpoint: str) -> int:
        """Requests that wait for their turn to ask one D."""
        return len(self._lanes[endpoint].waiting) if endpoint in self._lanes else 0

    def lanes(self, now: float) -> list[LaneView]:
        """Every D that is at work, in back-off or behind its breaker."""
        # From another thread too, for metrics: a list of the items is taken in one go.
        return [_view(endpoint, lane, now) for endpoint, lane in list(self._lanes.items())]

    # --- a request comes, asks, and goes -------------------------------------------------------

    def enqueue(self, endpoint: str, key: TransferKey, now: float) -> int:
        """Wait for the turn to ask `endpoint`; returns how many wait for it already."""
        lane = self._lane(endpoint, now)
        ahead = len(lane.waiting)
        lane.waiting[key] = next(self._arrivals)
        self._lane_of[key] = endpoint
        if lane.is_open(now) or lane.backs_off(now):
            self._held.add(endpoint)
        return ahead

    def start(self, may_ask: Callable[[str], bool], now: float) -> list[TransferKey]:
        """The requests that ask now, oldest first; `may_ask` says of a D whether calls can be made
        to it. They are in flight until `answered` or `withdraw`."""
        started: list[TransferKey] = []
        if self.paused:
            return started
        open_lanes = [
            lane
            for endpoint, lane in self._lanes.items()
            if lane.waiting
            and not lane.is_open(now)
            and not lane.backs_off(now)
            and may_ask(endpoint)
        ]
        holding = sum(bool(lane.granted) for lane in self._lanes.values())
        while heads := [lane for lane in open_lanes if self._may_ask_more(lane, holding)]:
            lane = min(heads, key=lambda each: next(iter(each.waiting.values())))
            key, arrival = lane.waiting.popitem(last=False)
            lane.asking[key] = arrival
            if lane.breaker.fault is not None:
                lane.probe = key
            self._asking += 1
            started.append(key)
        return started

    def probes(self, key: TransferKey) -> bool:
        """Whether a request asks only to find out whether its D answers."""
        endpoint = self._lane_of.get(key)
        return endpoint is not None and self._lanes[endpoint].probe == key

    def answered(self, key: TransferKey, granted: bool) -> None:
        """An Allocate in flight has ended; a grant counts until `computed` or `withdraw`."""
        endpoint = self._lane_of.get(key)
        if endpoint is None or not granted:
            self.withdraw(key)
            return
        lane = self._lanes[endpoint]
        self._stop_asking(lane, key)
        lane.granted.add(key)

    def ask_again(self, key: TransferKey) -> None:
        """An Allocate in flight has ended with nothing that counts: back to its old place."""
        endpoint = self._lane_of[key]
        lane = self._lanes[endpoint]
        arrival = lane.asking[key]
        self._stop_asking(lane, key)
        if lane.probe == key:
            lane.probe = None
        waiting = [*lane.waiting.items(), (key, arrival)]
        lane.waiting = OrderedDict(sorted(waiting, key=lambda item: item[1]))
        self._held.add(endpoint)

    def computed(self, key: TransferKey) -> None:
        """A grant has been computed, or never will be."""
        self.withdraw(key)

    def withdraw(self, key: TransferKey) -> None:
        """Forget a request, wherever it is."""
        endpoint = self._lane_of.pop(key, None)
        if endpoint is None:
            return
        lane = self._lanes[endpoint]
        self._stop_asking(lane, key)
        lane.forget(key)
        self._tidy(endpoint, lane)

    # --- what a D has said, or has not ---------------------------------------------------------

    def back_off(self, endpoint: str, refusal: Fault, now: float) -> None:
        """D has no room: it is asked no more for as long as it said, or for `backoff_s`."""
        limits = self._limits
        told_s = limits.backoff_s if refusal.retry_after_s is None else refusal.retry_after_s
        wait_s = min(told_s, limits.backoff_max_s) * (1 + limits.backoff_jitter * self._jitter())
        lane = self._lane(endpoint, now)
        lane.refusal = refusal
        lane.backoff_until = max(lane.backoff_until, now + wait_s)
        self._ends.set(endpoint, lane.backoff_until)
        self._held.add(endpoint)

    def failed(self, endpoint: str, fault: Fault, now: float) -> None:
        """D is lost or silent, or takes nothing."""
        self._lane(endpoint, now).breaker.failed(fault, now)
        self._held.add(endpoint)

    def heard(self, endpoint: str) -> None:
        """D has answered."""
        lane = self._lanes.get(endpoint)
        if lane is not None:
            lane.breaker.answered()
            lane.probe = None
            self._tidy(endpoint, lane)

    def reached(self, endpoint: str, now: float) -> None:
        """There is a session with D again."""
        if endpoint in self._lanes:
            self._lanes[endpoint].breaker.reached(now)
            self._look_elsewhere(now)

    def admits(self, endpoint: str, now: float) -> bool:
        """Whether a request may wait for D: not while its breaker is open."""
        return endpoint not in self._lanes or not self._lanes[endpoint].is_open(now)

    def breaker_left_s(self, endpoint: str, now: float) -> float:
        """How long the breaker of a D stays open."""
        lane = self._lanes.get(endpoint)
        return lane.breaker.left_s(now) if lane is not None else 0.0

    def takes(self, endpoint: str, now: float) -> bool:
        """Whether D may be asked, by somebody whose turn it is."""
        lane = self._lanes.get(endpoint)
        return lane is None or not (lane.is_open(now) or lane.backs_off(now))

    def held_back(self, now: float) -> list[tuple[TransferKey, Fault]]:
        """Requests that wait for a D which may not be asked, and why. Each is told of when it comes
        (back), when its D may no longer be asked, and when another D may be asked again."""
        found: list[tuple[TransferKey, Fault]] = []
        for endpoint in sorted(self._held):
            lane = self._lanes.get(endpoint)
            if lane is None:
                continue
            fault = lane.breaker.fault if lane.is_open(now) else None
            if fault is None and lane.backs_off(now):
                fault = lane.refusal
            if fault is not None:
                found += [(key, fault) for key in lane.waiting]
        self._held.clear()
        return found

    def tick(self, now: float) -> None:
        """Let time pass: whoever waited for the end of a back-off may ask."""
        over = self._ends.pop_due(now)
        for endpoint in over:
            lane = self._lanes.get(endpoint)
            if lane is not None:
                lane.refusal = None
                self._tidy(endpoint, lane)
        if over:
            self._look_elsewhere(now)

    def next_wake(self) -> float | None:
        """When `tick` must be called."""
        return self._ends.next()

    # -------------------------------------------------------------------------------------------

    def _lane(self, endpoint: str, now: float) -> _Lane:
        lane = self._lanes.get(endpoint)
        if lane is None:
            memory_s = self._limits.breaker_max_s
            for other, known in list(self._lanes.items()):
                if known.forgettable(now, memory_s):
                    del self._lanes[other]
                    self._ends.cancel(other)
            breaker = Breaker(self._limits.breaker_open_s, self._limits.breaker_max_s)
            lane = self._lanes[endpoint] = _Lane(breaker)
        return lane

    def _look_elsewhere(self, now: float) -> None:
        """A D may be asked again: whoever waits out the back-off of another may do better there."""
        self._held.update(
            endpoint
            for endpoint, lane in self._lanes.items()
            if lane.waiting and lane.backs_off(now)
        )

    def _tidy(self, endpoint: str, lane: _Lane) -> None:
        if lane.empty and lane.breaker.fault is None and lane.refusal is None:
            del self._lanes[endpoint]

    def _stop_asking(self, lane: _Lane, key: TransferKey) -> None:
        if lane.asking.pop(key, None) is not None:
            self._asking -= 1

    def _may_ask_more(self, lane: _Lane, holding: int) -> bool:
        """`holding` Ds have grants not yet computed; with this one they share `ahead`."""
        if not lane.waiting or (lane.breaker.fault is not None and lane.probe is not None):
            return False
        sharing = holding if lane.granted else holding + 1
        share = max(1, -(-self._limits.ahead // sharing))
        most = min(self._limits.window, self._limits.total - self._asking)
        return len(lane.asking) < most and len(lane.granted) < share


def _view(endpoint: str, lane: _Lane, now: float) -> LaneView:
    return LaneView(
        endpoint,
        in_flight=len(lane.asking),
        ready=len(lane.granted),
        waiting=len(lane.waiting),
        backoff_left_s=max(0.0, lane.backoff_until - now),
        breaker=lane.breaker.state(now),
        breaker_left_s=lane.breaker.left_s(now),
        breaker_fault=lane.breaker.fault,
    )
