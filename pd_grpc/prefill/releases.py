"""Giving transfers back to their Ds: each Release is made until D has answered it."""

from __future__ import annotations

from dataclasses import dataclass

from google.rpc import status_pb2

from pd_grpc.prefill.actions import SendRelease
from pd_grpc.prefill.conversations import Conversations
from pd_grpc.prefill.events import AnyFault, ReleaseAnswered
from pd_grpc.prefill.requests import Requests
from pd_grpc.prefill.sessions import DecodeSession, Phase, backoff_s
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import seconds
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.timers import Timers
from pd_grpc.v1 import decode_pb2, types_pb2


@dataclass(frozen=True)
class Owed:
    """Names a Release that is owed to the D at one endpoint; a user of its session."""

    endpoint: str
    key: TransferKey


@dataclass
class _Release:
    ref: types_pb2.TransferRef
    cause: status_pb2.Status | None
    session_id: str
    """What the last call carried, or is to carry while there is no session."""
    call: int = 0
    """Number of the last call, from 1; tells answers apart."""
    in_flight: bool = False
    writes_stopped: bool = True
    """What the next call says. With inline D does the writing, and so no write of P's can come."""
    unsaid: bool = False
    """Whether that has changed since the call that is in flight."""


class Releases:
    """What is owed to each D until it has heard of it.

    A session that breaks is mended for them, in the new one's name they are made again. Without
    them the client of a D would hear of a lease that ran out, and not why. They end when D's
    process is another one, and when D has forgotten the transfer for certain, but not under its
    session: it may have blocks kept until it hears that P writes no more. No more are owed than D
    would remember.
    """

    def __init__(
        self, requests: Requests, config: PrefillConfig, conversations: Conversations
    ) -> None:
        self._requests = requests
        self._config = config
        self._conversations = conversations
        self._owed: dict[Owed, _Release] = {}
        """In order of age."""
        self._over: Timers[Owed] = Timers()
        self._again: Timers[Owed] = Timers()

    def __len__(self) -> int:
        return len(self._owed)

    def owes(self, endpoint: str, key: TransferKey) -> bool:
        """Whether D is still to hear of a transfer's end."""
        return Owed(endpoint, key) in self._owed

    def give_back(
        self,
        key: TransferKey,
        endpoint: str,
        session_id: str,
        decode_epoch: int,
        cause: Fault | None,
        now: float,
        writes_stopped: bool = True,
    ) -> None:
        """Release a transfer; while that is owed already, the first cause stands. `session_id` is
        used while there is no session to be had; a `decode_epoch` of 0 means whichever process of
        D the next one is with. Where P may still write to D's memory D hears of the end at once,
        and of `stopped` later."""
        owed = Owed(endpoint, key)
        session = self._conversations.get(endpoint)
        if owed in self._owed or not _of_epoch(session, decode_epoch):
            return
        status = None if cause is None else cause.status()
        release = _Release(key.ref(decode_epoch), status, session_id, writes_stopped=writes_stopped)
        self._owed[owed] = release
        self._remember(owed, session, now)
        if len(self._owed) > self._config.tombstones:
            self._drop(next(iter(self._owed)), now)
        if session is None or session.phase is Phase.IDLE:
            self._call(owed, release)
            return
        self._conversations.hold(endpoint, owed, now)
        if session.phase is Phase.OPEN:
            release.session_id = session.session_id
            self._call(owed, release)

    def stopped(
        self, key: TransferKey, endpoint: str, session_id: str, decode_epoch: int, now: float
    ) -> None:
        """Nothing more is written for a transfer that has ended, on whichever side."""
        release = self._owed.get(Owed(endpoint, key))
        if release is None:
            self.give_back(key, endpoint, session_id, decode_epoch, None, now)
        elif not release.writes_stopped:
            release.writes_stopped = True
            release.unsaid = release.in_flight

    def answered(self, event: ReleaseAnswered, now: float) -> None:
        """A Release has ended."""
        owed = Owed(event.sent.endpoint, event.sent.key)
        release = self._owed.get(owed)
        if release is None or release.call != event.sent.call:
            self._requests.late_events += 1
            return
        release.in_flight = False
        if event.fault is None or not _again_may_do(event.fault):
            if release.unsaid:
                self._call(owed, release)
            else:
                self._drop(owed, now)
            return
        session = self._conversations.get(owed.endpoint)
        if session is None or session.phase is not Phase.OPEN:
            return
        if session.session_id != release.session_id:
            release.session_id = session.session_id
            self._call(owed, release)
        else:
            self._again.set(owed, now + backoff_s(self._config, release.call))

    def opened(self, session: DecodeSession, now: float) -> None:
        """A D can be reached again, or for the first time."""
        for owed in self._owed_to(session.endpoint):
            release = self._owed[owed]
            if not _of_epoch(session, release.ref.decode_epoch):
                self._drop(owed, now)
                continue
            release.ref.decode_epoch = session.instance.epoch
            self._conversations.hold(owed.endpoint, owed, now)
            # One under way is answered with NO_SESSION unless the old session still counts.
            if not release.in_flight:
                release.session_id = session.session_id
                self._call(owed, release)

    def reconnecting(self) -> bool:
        """Whether a D that has yet to hear of a release may be back in a moment."""
        sessions = (self._conversations.get(owed.endpoint) for owed in self._owed)
        soon = (Phase.CONNECTING, Phase.WAITING)
        return any(session is not None and session.phase in soon for session in sessions)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for owed in self._over.pop_due(now):
            session = self._conversations.get(owed.endpoint)
            if session is not None and _known_to(session, self._owed[owed].ref.decode_epoch):
                self._remember(owed, session, now)
            else:
                self._drop(owed, now)
        for owed in self._again.pop_due(now):
            release = self._owed[owed]
            if self._conversations.is_open(owed.endpoint):
                release.session_id = self._conversations[owed.endpoint].session_id
                self._call(owed, release)

    def next_wake(self) -> float | None:
        """When `tick` must be called."""
        wakes = (self._over.next(), self._again.next())
        return min((at for at in wakes if at is not None), default=None)

    def clear(self, now: float) -> None:
        """Owe nothing more, for the goodbye tells each D enough."""
        for owed in list(self._owed):
            self._drop(owed, now)

    def _remember(self, owed: Owed, session: DecodeSession | None, now: float) -> None:
        """Look again when D will have forgotten the transfer."""
        grace_s = self._config.grace_s if session is None else seconds(session.welcome.grace)
        self._over.set(owed, now + grace_s + self._config.tombstone_s)

    def _owed_to(self, endpoint: str) -> list[Owed]:
        return [owed for owed in self._owed if owed.endpoint == endpoint]

    def _call(self, owed: Owed, release: _Release) -> None:
        release.call += 1
        release.in_flight = True
        release.unsaid = False
        self._again.cancel(owed)
        request = decode_pb2.ReleaseRequest(
            session_id=release.session_id,
            ref=release.ref,
            cause=release.cause,
            writes_stopped=release.writes_stopped,
        )
        timeout_s = self._config.call_s
        self._requests.do(SendRelease(owed.key, release.call, owed.endpoint, request, timeout_s))

    def _drop(self, owed: Owed, now: float) -> None:
        del self._owed[owed]
        self._over.cancel(owed)
        self._again.cancel(owed)
        self._conversations.let_go(owed.endpoint, owed, now)


def _of_epoch(session: DecodeSession | None, decode_epoch: int) -> bool:
    """Whether the D that is talked to, if any, may know the transfer."""
    if session is None or session.phase is not Phase.OPEN:
        return True
    return decode_epoch in (0, session.instance.epoch)


def _known_to(session: DecodeSession, decode_epoch: int) -> bool:
    """Whether the process that granted is in conversation with us, or may be back in a moment."""
    return session.phase is not Phase.IDLE and session.instance.epoch == decode_epoch


def _again_may_do(fault: AnyFault) -> bool:
    """Whether D may not have heard it, but will in time."""
    if isinstance(fault, Fault):
        return fault.reason is Reason.NO_SESSION
    return fault.peer_lost or fault.code is Code.DEADLINE_EXCEEDED
