"""How long an instance has lately needed for a request; and so for which of those that wait it is
too late.

An instance finishes fewer in time, not more, when what it begins has waited nearly all its time:
such a request holds blocks until its deadline and then is nobody's. Under a load that cannot be
carried all of them are such, for whoever waited longest is served first.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from pd_grpc.protocol.faults import Fault, stage_deadline

REMEMBERED = 64
"""Ends that are looked at."""
FEWEST = 16
"""Ends before which nothing is known."""
_LONGER = 1.5
"""What ran out of time would have taken longer than it had, by nobody knows how much."""


class Served(NamedTuple):
    """What a request took: seconds that do not depend on its size, seconds that may, and its size,
    in tokens."""

    fixed_s: float
    sized_s: float
    size: int

    def took_s(self, size: int) -> float:
        """What a smaller one would have taken; a larger one counts as if it were as large."""
        return self.fixed_s + self.sized_s * min(1.0, size / self.size)


class ServingTimes:
    """The last requests that were served, or were not to their end."""

    def __init__(self, quantile: float) -> None:
        """A request needs as long as this part of the last ones took at the most, from 0 to 1; with
        0 nothing is ever known."""
        self._quantile = quantile
        self._served: deque[Served] = deque(maxlen=REMEMBERED)

    def finished(self, served: Served) -> None:
        """One has come to its end."""
        self._served.append(served)

    def ran_out(self, served: Served) -> None:
        """One ran out of time. That says something if it had as long as others need, and nothing if
        it had come with little."""
        longer = Served(_LONGER * served.fixed_s, _LONGER * served.sized_s, served.size)
        needed_s = self.needed_s(served.size)
        if needed_s is None or longer.took_s(served.size) > needed_s:
            self._served.append(longer)

    def needed_s(self, size: int) -> float | None:
        """Seconds for a request of a size; None while too little is known."""
        return self._at_quantile([each.took_s(size) for each in self._served])

    def sized_s(self) -> float | None:
        """Seconds for that part alone which may depend on the size, whatever the size."""
        return self._at_quantile([each.sized_s for each in self._served])

    def _at_quantile(self, times: list[float]) -> float | None:
        if not self._quantile or len(times) < FEWEST:
            return None
        return sorted(times)[math.ceil(self._quantile * len(times)) - 1]


def too_late(needed_s: float, left_s: float, budget_s: float, stage: str) -> Fault | None:
    """Why a request whose turn has come need not be begun: half of its time is over, and what is
    left is less than others needed."""
    if left_s >= min(needed_s, budget_s / 2):
        return None
    text = f": {left_s:.3g} s are left, and {needed_s:.3g} s are needed from here"
    return stage_deadline(stage, text)
