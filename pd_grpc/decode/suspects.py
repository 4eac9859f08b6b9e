"""Who made a step of the engine fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Suspects:
    """Finds by halves those at whose computing the engine raises.

    The requests of a step that raised are tried again in two halves, one after the other, and each
    half that raises in two halves of its own. So of n requests the one at fault is found in at most
    2 log2(n) further steps, and any number of them in fewer than 2 n; all others have gone on by
    then.
    """

    def __init__(self) -> None:
        self._groups: deque[frozenset[str]] = deque()

    def raised(self, grant_ids: Sequence[str]) -> None:
        """The engine raised over these, who were in a step together."""
        half = (len(grant_ids) + 1) // 2
        for part in (grant_ids[half:], grant_ids[:half]):
            if part:
                self._groups.appendleft(frozenset(part))

    def next(self) -> frozenset[str] | None:
        """Those to be tried in the next step, and nobody else; None when nobody is suspected. They
        are suspected no more unless they are named again."""
        return self._groups.popleft() if self._groups else None
