"""The prepare pool: which requests may ask their D for blocks now.

Each D has a window of its own inside a total, so that a D that is slow, full or silent holds its
own window only. Grants not yet computed are bounded too, so that D's blocks are not held idle: the
Ds at work share `ahead` between them, and one whose grants pile up holds back nobody else.
Allocates that still wait do not count against that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import count

from pd_grpc.protocol.refs import TransferKey


class _Lane:
    """The requests of one D: those that wait, in order of arrival, and those that ask."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[TransferKey, int] = OrderedDict()
        self.asking: set[TransferKey] = set()
        self.granted: set[TransferKey] = set()

    @property
    def empty(self) -> bool:
        """Whether nothing is under way for this D."""
        return not (self.waiting or self.asking or self.granted)


class PreparePool:
    """`window` Allocates per D and `total` in all may be in flight; none starts for a D whose share
    of `ahead` is used up by grants not yet computed."""

    def __init__(self, window: int, total: int, ahead: int) -> None:
        self._window = window
        self._total = total
        self._ahead = ahead
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[TransferKey, str] = {}
        self._asking = 0
        self._arrivals = count()

    @property
    def in_flight(self) -> int:
        """Allocates in flight."""
        return self._asking

    @property
    def granted(self) -> int:
        """Grants not yet computed."""
        return sum(len(lane.granted) for lane in self._lanes.values())

    def waiting_for(self, endpoint: str) -> int:
        """Requests that wait for their turn to ask one D."""
        return len(self._lanes[endpoint].waiting) if endpoint in self._lanes else 0

    def enqueue(self, endpoint: str, key: TransferKey) -> int:
        """Wait for the turn to ask `endpoint`; returns how many wait for it already."""
        lane = self._lanes.setdefault(endpoint, _Lane())
        ahead = len(lane.waiting)
        lane.waiting[key] = next(self._arrivals)
        self._lane_of[key] = endpoint
        return ahead

    def start(self, may_ask: Callable[[str], bool]) -> list[TransferKey]:
        """The requests that ask now, oldest first; `may_ask` says of a D whether it can be asked at
        all. They are in flight until `answered` or `withdraw`."""
        started: list[TransferKey] = []
        open_lanes = [
            lane for endpoint, lane in self._lanes.items() if lane.waiting and may_ask(endpoint)
        ]
        share = max(1, -(-self._ahead // max(1, len(self._lanes))))
        while self._asking < self._total:
            heads = [lane for lane in open_lanes if self._may_ask_more(lane, share)]
            if not heads:
                break
            lane = min(heads, key=lambda each: next(iter(each.waiting.values())))
            key, _ = lane.waiting.popitem(last=False)
            lane.asking.add(key)
            self._asking += 1
            started.append(key)
        return started

    def answered(self, key: TransferKey, granted: bool) -> None:
        """An Allocate in flight has ended; a grant counts until `computed` or `withdraw`."""
        endpoint = self._lane_of.get(key)
        if endpoint is None or not granted:
            self.withdraw(key)
            return
        lane = self._lanes[endpoint]
        if key in lane.asking:
            lane.asking.remove(key)
            self._asking -= 1
        lane.granted.add(key)

    def computed(self, key: TransferKey) -> None:
        """A grant has been computed, or never will be."""
        self.withdraw(key)

    def withdraw(self, key: TransferKey) -> None:
        """Forget a request, wherever it is."""
        endpoint = self._lane_of.pop(key, None)
        if endpoint is None:
            return
        lane = self._lanes[endpoint]
        lane.waiting.pop(key, None)
        lane.granted.discard(key)
        if key in lane.asking:
            lane.asking.remove(key)
            self._asking -= 1
        if lane.empty:
            del self._lanes[endpoint]

    def _may_ask_more(self, lane: _Lane, share: int) -> bool:
        return bool(lane.waiting) and len(lane.asking) < self._window and len(lane.granted) < share
