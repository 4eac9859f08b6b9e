"""How long an instance has lately needed for a request; and so for which of those that wait it is
too late.

An instance finishes fewer in time, not more, when what it begins has waited nearly all its time:
such a request holds blocks until its deadline and then is nobody's. Under a load that cannot be
carried all of them are such, for whoever waited longest is served first.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import NamedTuple

from pd_grpc.protocol.faults import Fault, stage_deadline

REMEMBERED = 64
"""Ends that are looked at."""
MEMORY_S = 300.0
"""How long one is, at the most."""
FEWEST = 20
"""Ends before which nothing is known."""
PEERS = 64
"""Peers of which something is known, the ones heard of last."""
_LONGER = 1.5
"""What ran out of time would have taken longer than it had, by nobody knows how much."""
_AT_THE_END = 0.05
"""What ran out of time has no more left than this part of it."""


class Served(NamedTuple):
    """What a request took: seconds that do not depend on its size, seconds that may, and its size,
    in tokens."""

    fixed_s: float
    sized_s: float
    size: int

    def took_s(self, size: int) -> float:
        """What a smaller one would have taken; a larger one counts as if it were as large."""
        return self.fixed_s + self.sized_s * min(1.0, size / self.size)


class Budget(NamedTuple):
    """A request's time: all of it, and what is left, in seconds."""

    whole_s: float
    left_s: float

    @property
    def half_spent(self) -> bool:
        """Whether it may be too late for it at all."""
        return self.left_s < self.whole_s / 2

    @property
    def spent(self) -> bool:
        """Whether it ended because its time did, whoever said so first."""
        return self.left_s <= _AT_THE_END * self.whole_s


class ServingTimes:
    """The last requests that were served, or were not to their end. Times are of one clock."""

    def __init__(self, quantile: float) -> None:
        """A request needs as long as this part of the last ones took at the most, from 0 to 1; with
        0 nothing is ever known."""
        self._quantile = quantile
        self._served: deque[tuple[float, Served]] = deque(maxlen=REMEMBERED)

    def finished(self, served: Served, now: float) -> None:
        """One has come to its end."""
        self._served.append((now, served))

    def ran_out(self, served: Served, now: float) -> None:
        """One ran out of time. That says something if it had as long as others need, and nothing if
        it had come with little."""
        longer = Served(_LONGER * served.fixed_s, _LONGER * served.sized_s, served.size)
        needed_s = self.needed_s(served.size, now)
        if needed_s is None or longer.took_s(served.size) > needed_s:
            self._served.append((now, longer))

    def needed_s(self, size: int, now: float) -> float | None:
        """Seconds for a request of a size; None while too little is known."""
        return self._at_quantile([each.took_s(size) for each in self._of_late(now)])

    def sized_s(self, now: float) -> float | None:
        """Seconds for that part alone which may depend on the size, of the largest ones."""
        return self._at_quantile([each.sized_s for each in self._of_late(now)])

    def sized_s_each(self, now: float) -> float | None:
        """The same for each token of the size."""
        return self._at_quantile([each.sized_s / each.size for each in self._of_late(now)])

    def _of_late(self, now: float) -> list[Served]:
        while self._served and self._served[0][0] + MEMORY_S <= now:
            self._served.popleft()
        return [served for _, served in self._served]

    def _at_quantile(self, times: list[float]) -> float | None:
        if not self._quantile or len(times) < FEWEST:
            return None
        return sorted(times)[math.ceil(self._quantile * len(times)) - 1]


class ServingTimesByPeer:
    """Those with each peer apart, so that a slow one says nothing of the others."""

    def __init__(self, quantile: float) -> None:
        """See `ServingTimes`."""
        self._quantile = quantile
        self._peers: OrderedDict[str, ServingTimes] = OrderedDict()

    def of(self, peer: str) -> ServingTimes:
        """Those with one peer."""
        if peer not in self._peers:
            self._peers[peer] = ServingTimes(self._quantile)
        self._peers.move_to_end(peer)
        while len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        return self._peers[peer]


def too_late(needed_s: float | None, budget: Budget, stage: str) -> Fault | None:
    """Why a request whose turn has come need not be begun: half of its time is over, and what is
    left is less than others needed."""
    if needed_s is None or not budget.half_spent or budget.left_s >= needed_s:
        return None
    text = f": {budget.left_s:.3g} s are left, and {needed_s:.3g} s are needed from here"
    return stage_deadline(stage, text)
