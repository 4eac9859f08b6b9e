"""Grants live as long as somebody says they do."""

from __future__ import annotations

from pd_grpc.protocol.timers import Timers


class Leases:
    """When each grant ends unless its holder renews it. Times are seconds of the caller's clock."""

    def __init__(self, life_s: float) -> None:
        self._life_s = life_s
        self._ends: Timers[str] = Timers()

    def __contains__(self, grant_id: str) -> bool:
        return self._ends.at(grant_id) is not None

    def start(self, grant_id: str, now: float) -> None:
        """Let a grant live for one lease from now."""
        self._ends.set(grant_id, now + self._life_s)

    def renew(self, grant_id: str, now: float) -> bool:
        """Let a grant that has not ended live for one lease from now; False when it has."""
        if grant_id not in self:
            return False
        self.start(grant_id, now)
        return True

    def end(self, grant_id: str) -> None:
        """Forget a grant."""
        self._ends.cancel(grant_id)

    def ends_at(self, grant_id: str) -> float | None:
        """When a grant ends; None for one that has no lease."""
        return self._ends.at(grant_id)

    def next(self) -> float | None:
        """When the first lease ends."""
        return self._ends.next()

    def pop_expired(self, now: float) -> list[str]:
        """Remove and return the grants whose lease has ended, earliest first."""
        return self._ends.pop_due(now)
