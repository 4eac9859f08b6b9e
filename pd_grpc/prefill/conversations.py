"""P's sessions with all its Ds, and what their news means for the requests bound to them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Protocol

from pd_grpc.prefill import notices, sessions
from pd_grpc.prefill.actions import ForgetDecode, Superseded
from pd_grpc.prefill.carriers import INLINE_ALONE, Carriers
from pd_grpc.prefill.decode_faults import ended_fault, our_mistake, unavailable
from pd_grpc.prefill.events import SessionBroken, SessionMessage, TransportFailed
from pd_grpc.prefill.requests import Requests
from pd_grpc.prefill.sessions import DecodeSession, Phase
from pd_grpc.prefill.states import PrefillRecord, PrefillState
from pd_grpc.prefill.validation import ModelLimits
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason, not_meant
from pd_grpc.protocol.messages import layout_to_proto
from pd_grpc.protocol.refs import key_of
from pd_grpc.v1 import decode_pb2, types_pb2

Fail = Callable[[PrefillRecord, Fault, float, bool], None]
"""Ends a request: the record, why, when, and whether D is to be told."""


class Placed(Protocol):
    """Who finds a D for each request."""

    def turn_away(self, record: PrefillRecord, fault: Fault, now: float) -> None:
        """The D it waits for cannot be had."""

    def opened(self, session: DecodeSession, now: float) -> None:
        """A D can be reached, for the first time or again."""

    def unreachable(self, endpoint: str, fault: Fault, now: float) -> None:
        """A D cannot be reached, or takes nobody in."""

    def lose_ask(self, record: PrefillRecord, fault: Fault, now: float) -> None:
        """The D it asks will not answer."""

    def session_up(self, record: PrefillRecord, now: float) -> None:
        """The D that has granted can be reached again."""


class Conversations:
    """One session for each D that a request is bound to, and `session_idle_s` longer."""

    def __init__(
        self,
        requests: Requests,
        config: PrefillConfig,
        instance: types_pb2.Instance,
        limits: ModelLimits,
        placed: Placed,
        fail: Fail,
        carriers: Carriers = INLINE_ALONE,
    ) -> None:
        self.carriers = carriers
        self.superseded: Fault | None = None
        """Set once a newer process of our name is known."""
        self._requests = requests
        self._config = config
        self._instance = instance
        self._limits = limits
        self._placed = placed
        self._fail = fail
        self._sessions: dict[str, DecodeSession] = {}
        self._links = count(1)

    def __getitem__(self, endpoint: str) -> DecodeSession:
        return self._sessions[endpoint]

    def get(self, endpoint: str) -> DecodeSession | None:
        """The session with a D, if a request is bound to it or was a while ago."""
        return self._sessions.get(endpoint)

    def all(self) -> list[DecodeSession]:
        """Every session there is."""
        return list(self._sessions.values())

    def is_open(self, endpoint: str) -> bool:
        """Whether calls can be made to a D."""
        return endpoint in self._sessions and self._sessions[endpoint].phase is Phase.OPEN

    def bind(self, record: PrefillRecord, now: float) -> None:
        """A request turns to a D: connect if need be."""
        endpoint = record.target.endpoint
        session = self._sessions.get(endpoint)
        if session is None:
            session = DecodeSession(
                endpoint,
                self._limits.layout,
                self._hello,
                lambda: next(self._links),
                self._config,
            )
            self._sessions[endpoint] = session
        self._consume(session, session.bind(record.key, record.target.name, now), now)

    def unbind(self, record: PrefillRecord, now: float) -> None:
        """A request has nothing to do with its D any more."""
        session = self._sessions.get(record.target.endpoint)
        if session is not None:
            self._consume(session, session.unbind(record.key, now), now)

    def hold(self, endpoint: str, user: object, now: float) -> None:
        """Something other than a request needs the session as long as it can be had."""
        session = self._sessions[endpoint]
        self._consume(session, session.bind(user, "", now), now)

    def let_go(self, endpoint: str, user: object, now: float) -> None:
        """Undo `hold`."""
        session = self._sessions.get(endpoint)
        if session is not None and user in session.users:
            self._consume(session, session.unbind(user, now), now)

    def message(self, event: SessionMessage, now: float) -> None:
        """D said something."""
        session = self._sessions.get(event.endpoint)
        out = session.message(event.link, event.message, now) if session is not None else None
        self._heard(session, out, now)

    def broken(self, event: SessionBroken, now: float) -> None:
        """A session's stream has ended."""
        session = self._sessions.get(event.endpoint)
        out = session.broken(event.link, event.fault, now) if session is not None else None
        self._heard(session, out, now)

    def transport_failed(self, event: TransportFailed, now: float) -> None:
        """What a D chose does not get us there."""
        session = self._sessions.get(event.endpoint)
        out = None
        if session is not None:
            out = session.transport_failed(event.link, event.transport, now)
        self._heard(session, out, now)

    def tick(self, now: float) -> None:
        """Let every session do what is due."""
        for session in self.all():
            self._consume(session, session.tick(now), now)

    def next_wake(self) -> float | None:
        """When `tick` must be called."""
        wakes = [at for s in self._sessions.values() if (at := s.next_wake()) is not None]
        return min(wakes, default=None)

    def leave(self, reason: str, now: float) -> None:
        """Say goodbye to every D; no request is in flight."""
        for session in self.all():
            self._consume(session, session.leave(reason), now)

    def _hello(self, name: str) -> decode_pb2.Hello:
        shards = self._limits.shards
        return decode_pb2.Hello(
            instance=self._instance,
            decode_name=name,
            features=sorted(self._limits.features),
            layouts=[layout_to_proto(self._limits.layout)],
            transports=self.carriers.wire,
            shards=[shard.to_proto() for shard in shards] if len(shards) > 1 else (),
        )

    def _heard(
        self, session: DecodeSession | None, out: list[sessions.Output] | None, now: float
    ) -> None:
        if session is None or out is None:
            self._requests.late_events += 1
        else:
            self._consume(session, out, now)

    def _consume(self, session: DecodeSession, out: list[sessions.Output], now: float) -> None:
        """Pass actions on, and act on notices."""
        for each in out:
            if isinstance(each, notices.Opened):
                if (twin := self._twin(session, now)) is not None:
                    self._consume(session, session.refuse(_same(session, twin)), now)
                    continue
                self._placed.opened(session, now)
                for record in self._bound(session):
                    if record.grant is not None:
                        self._placed.session_up(record, now)
            elif isinstance(each, notices.Unreachable):
                self._placed.unreachable(session.endpoint, each.fault, now)
                self._drop_waiting(session, each.fault, now)
            elif isinstance(each, notices.Lost):
                self._drop_known(session, each.fault, now)
                self._drop_waiting(session, each.fault, now)
            elif isinstance(each, notices.Refused):
                self._refused(session, each, now)
            elif isinstance(each, notices.UnknownGrants):
                self._lose_grants(session, each.grant_ids, now)
            elif isinstance(each, notices.Ended):
                self._ended(session, each.ended, now)
            elif not isinstance(each, notices.Draining | notices.Left):
                self._requests.do(each)
        if session.phase is Phase.IDLE:
            for user in session.users - self._requests.in_flight.keys():
                session.unbind(user, now)
        gone = session.phase is Phase.IDLE and not session.users
        if gone and self._sessions.get(session.endpoint) is session:
            del self._sessions[session.endpoint]
            self._requests.do(ForgetDecode(session.endpoint))

    def _twin(self, session: DecodeSession, now: float) -> DecodeSession | None:
        """Another session with the same process of D, by another address, that is in use. D keeps
        one per P, so that each would end the other's; one that nobody uses is left."""
        for other in self.all():
            same = other.instance == session.instance and other is not session
            if not same or other.phase is Phase.IDLE:
                continue
            if other.users:
                return other
            self._consume(other, other.leave("reached by another address"), now)
        return None

    def _bound(self, session: DecodeSession) -> list[PrefillRecord]:
        """The requests of one D, oldest first."""
        users = session.users
        return [record for record in self._requests.in_flight.values() if record.key in users]

    def _drop_waiting(self, session: DecodeSession, fault: Fault, now: float) -> None:
        """D cannot be had: those that wait turn elsewhere at once, and those that ask when no
        further try is made to reach it."""
        if session.phase in (Phase.CONNECTING, Phase.OPEN):
            return
        given_up = session.phase is Phase.IDLE
        for record in self._bound(session):
            if record.state is PrefillState.QUEUED:
                self._placed.turn_away(record, fault, now)
            elif given_up and record.asking:
                self._placed.lose_ask(record, fault, now)

    def _drop_known(self, session: DecodeSession, fault: Fault, now: float) -> None:
        """D's memory of our grants and calls is gone."""
        for record in self._bound(session):
            if record.grant is not None:
                self._fail(record, fault, now, False)
            elif record.asking:
                self._placed.lose_ask(record, fault, now)

    def _refused(self, session: DecodeSession, refused: notices.Refused, now: float) -> None:
        fault = refused.fault
        if fault.reason is Reason.STALE_EPOCH and self.superseded is None:
            self.superseded = fault
            self._requests.do(Superseded(fault))
        if unavailable(fault):
            self._placed.unreachable(session.endpoint, fault, now)
        self._drop_known(session, fault, now)
        name_alone = fault.reason is Reason.WRONG_INSTANCE
        for record in self._bound(session):
            if not name_alone or record.target.name == refused.name:
                self._placed.turn_away(record, fault, now)
        # Those left mean another instance at the same address, or any: ask again in their name.
        left = self._bound(session)
        if left:
            self._consume(session, session.bind(left[0].key, left[0].target.name, now), now)

    def _lose_grants(self, session: DecodeSession, grant_ids: tuple[str, ...], now: float) -> None:
        for record in self._bound(session):
            # While D has yet to answer the first token, that answer says what has become of it.
            if record.first_token_in_flight or record.grant is None:
                continue
            if record.grant.grant_id in grant_ids:
                text = f"decode instance {session.instance.name} knows no grant of {record.key}"
                self._fail(record, Fault(Reason.LEASE_EXPIRED, text), now, True)

    def _ended(self, session: DecodeSession, ended: decode_pb2.TransferEnded, now: float) -> None:
        record = self._requests.in_flight.get(key_of(ended.ref))
        finished = ended.state == types_pb2.TRANSFER_STATE_FINISHED
        same = ended.ref.decode_epoch in (0, session.instance.epoch)
        if record is None or record.key not in session.users or finished or not same:
            # Of an answer that is complete the first token's answer tells; nothing is left to do.
            self._requests.late_events += 1
            return
        fault = our_mistake(ended_fault(ended), "the KV")
        self._fail(record, fault, now, False)


def _same(session: DecodeSession, twin: DecodeSession) -> Fault:
    name = session.instance.name
    text = f"{session.endpoint} is {name}, which is in use here as {twin.endpoint}"
    return not_meant(
        Reason.WRONG_INSTANCE, f"{text}; name it by one address", session.endpoint, twin.endpoint
    )
