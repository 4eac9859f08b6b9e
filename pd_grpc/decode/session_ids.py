"""Which P a Transfer's session id names, as a shard knows it."""

from __future__ import annotations

from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.faults import Fault, Reason

IDS_KEPT = 2
"""Of each P its session and the one before: a stream may be opened while a new session begins."""


class SessionIds:
    """The session ids that Transfer streams may carry."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._ids: dict[Owner, list[str]] = {}

    def admit(self, owner: Owner, session_id: str) -> None:
        """A P has a new session."""
        ids = self._ids.setdefault(owner, [])
        ids.append(session_id)
        self._owners[session_id] = owner
        while len(ids) > IDS_KEPT:
            del self._owners[ids.pop(0)]

    def dismiss(self, owner: Owner) -> None:
        """A P is gone; so are its ids."""
        for session_id in self._ids.pop(owner, ()):
            del self._owners[session_id]

    def owner_of(self, session_id: str) -> Owner:
        """The P whose session this is. Fault NO_SESSION when it is unknown or long superseded."""
        owner = self._owners.get(session_id)
        if owner is None:
            raise Fault(Reason.NO_SESSION, "the session is unknown or superseded: open a new one")
        return owner
