"""Writing into D's memory, where P does it itself: D hears when that is over."""

from __future__ import annotations

from pd_grpc.prefill.conversations import Conversations
from pd_grpc.prefill.releases import Releases
from pd_grpc.prefill.sessions import DecodeSession, Phase
from pd_grpc.prefill.states import PrefillRecord, Stream


class Writing:
    """Whether a request may yet write, and who is told that it has stopped.

    D is told by a Release, also where it was D that ended the transfer. A D with which there is no
    session is not: it hears that its memory was let go of. Nor is one told of what P does not know:
    where a write may land for all that, D ends P's way to its memory, and then knows by itself.
    """

    def __init__(self, conversations: Conversations, releases: Releases) -> None:
        self._conversations = conversations
        self._releases = releases

    def stopped(self, record: PrefillRecord) -> bool:
        """What a Release that goes out now says; one that says so is the last."""
        if record.grant is None:
            return True
        record.stop_told = not self._may_write(record)
        return record.stop_told

    def over(self, record: PrefillRecord, now: float) -> None:
        """Of a request that has ended the last stream may have, too: tell D unless it knows."""
        grant = record.grant
        if grant is None or record.stop_told or not record.state.terminal:
            return
        if not self._conversations.carriers.writes(grant.transport) or self._may_write(record):
            return
        record.stop_told = True
        streams = record.streams.values()
        if not streams or any(stream is not Stream.COMPLETED for stream in streams):
            self._tell(record, grant.endpoint, grant.decode.epoch, now)

    def asked_in_vain(self, record: PrefillRecord, now: float) -> None:
        """D has ended a transfer whose grant may be on its way: tell it that nothing will be
        written for that."""
        session = self._session(record.target.endpoint)
        if session is None:
            return
        if self._conversations.carriers.writes(session.welcome.transport):
            self._tell(record, session.endpoint, record.asked_epoch, now)

    def _tell(self, record: PrefillRecord, endpoint: str, epoch: int, now: float) -> None:
        session = self._session(endpoint)
        if session is not None:
            self._releases.stopped(record.key, endpoint, session.session_id, epoch, now)

    def _session(self, endpoint: str) -> DecodeSession | None:
        session = self._conversations.get(endpoint)
        return None if session is None or session.phase is Phase.IDLE else session

    def _may_write(self, record: PrefillRecord) -> bool:
        grant = record.grant
        if grant is None or not self._conversations.carriers.writes(grant.transport):
            return False
        return record.may_land or any(s.uses_blocks for s in record.streams.values())
