"""D's rules toward P as a whole: sessions, heartbeats, and what a lost P takes with it."""

from __future__ import annotations

from pd_grpc.decode.actions import AdmitSession, DismissPrefill, SessionEnd, SessionSend
from pd_grpc.decode.checks import draining
from pd_grpc.decode.deadlines import Grace, Silence
from pd_grpc.decode.events import (
    GoodbyeReceived,
    HeartbeatReceived,
    HelloReceived,
    SessionStreamEnded,
)
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.sessions import Session
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Owner, Transfer
from pd_grpc.protocol.config import SILENT_HEARTBEATS
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import decode_pb2


class SessionDesk:
    """Knows which P lives."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def hello(self, event: HelloReceived) -> None:
        """Take a P in, or end its stream with what is wrong."""
        ledger = self._ledger
        instance = event.hello.instance
        known = ledger.sessions.of_owner(Owner(instance.name, instance.epoch))
        if ledger.draining and known is None:
            ledger.act(SessionEnd(event.stream, draining()))
            return
        try:
            joined = ledger.sessions.join(event.stream, event.hello, ledger.mint("s"))
        except Fault as fault:
            ledger.act(SessionEnd(event.stream, fault))
            return
        for old in (joined.replaced, joined.outlived):
            if old is not None and old.stream is not None:
                self._quiet(old.stream)
                text = "a newer session of this prefill took over"
                ledger.act(SessionEnd(old.stream, Fault(Reason.SUPERSEDED, text)))
        if joined.outlived is not None:
            self._lose(joined.outlived.owner, "its process was replaced by a newer one")
        for transfer in self._owned_by(joined.session.owner):
            ledger.leases.renew(transfer.grant_id, ledger.now)
        self._expect_heartbeat(event.stream)
        ledger.act(AdmitSession(joined.session.owner, joined.session.session_id))
        welcome = decode_pb2.SessionResponse(welcome=joined.welcome)
        ledger.act(SessionSend(event.stream, welcome))
        if ledger.draining:
            # It comes back, and may have missed the word while it was away.
            ledger.act(SessionSend(event.stream, decode_pb2.SessionResponse(drain=ledger.drain())))

    def heartbeat(self, event: HeartbeatReceived) -> None:
        """Renew the listed grants alone, and name those that are unknown; of what has ended say
        first how, for P would take it for lost otherwise."""
        ledger = self._ledger
        session = ledger.sessions.of_stream(event.stream)
        if session is None:
            ledger.late()
            return
        self._expect_heartbeat(event.stream)
        unknown = [g for g in event.heartbeat.grant_ids if not self._renew(session, g)]
        for grant_id in unknown:
            ledger.tell_again(grant_id, session)
        ack = decode_pb2.HeartbeatAck(sequence=event.heartbeat.sequence, unknown_grant_ids=unknown)
        ledger.act(SessionSend(event.stream, decode_pb2.SessionResponse(heartbeat_ack=ack)))
        load = self._load(session.owner)
        if load != session.load:
            session.load = load
            ledger.act(SessionSend(event.stream, decode_pb2.SessionResponse(load=load)))

    def goodbye(self, event: GoodbyeReceived) -> None:
        """A P that leaves on purpose takes its transfers with it."""
        session = self._ledger.sessions.of_stream(event.stream)
        if session is None:
            self._ledger.late()
            return
        self._quiet(event.stream)
        self._ledger.sessions.forget(session)
        self._lose(session.owner, "it said goodbye")
        self._ledger.act(SessionEnd(event.stream, None))

    def stream_ended(self, event: SessionStreamEnded) -> None:
        """A broken session's grants live on for the grace period."""
        session = self._ledger.sessions.of_stream(event.stream)
        if session is None:
            return
        self._quiet(event.stream)
        self._broken(session)

    def silent(self, stream: int) -> None:
        """No heartbeat came for two periods: as good as broken."""
        session = self._ledger.sessions.of_stream(stream)
        if session is None:
            return
        self._broken(session)
        text = f"no heartbeat for {self._patience_s:g} s"
        self._ledger.act(SessionEnd(stream, Fault(Reason.LEASE_EXPIRED, text)))

    def session_over(self, session_id: str) -> None:
        """The grace period of a broken session has passed."""
        try:
            session = self._ledger.sessions.of_call(session_id)
        except Fault:
            return
        if session.stream is None:
            self._ledger.sessions.forget(session)
            self._lose(session.owner, "its session broke and did not come back")

    def leave(self) -> None:
        """Say goodbye to every P, for D leaves on purpose."""
        goodbye = decode_pb2.Goodbye(reason="this decode instance stops")
        for session in self._ledger.sessions.live():
            assert session.stream is not None
            self._quiet(session.stream)
            message = decode_pb2.SessionResponse(goodbye=goodbye)
            self._ledger.act(SessionSend(session.stream, message))
            self._ledger.act(SessionEnd(session.stream, None))
            self._ledger.sessions.forget(session)

    @property
    def _patience_s(self) -> float:
        return SILENT_HEARTBEATS * self._ledger.config.heartbeat_s

    def _expect_heartbeat(self, stream: int) -> None:
        self._ledger.timers.set(Silence(stream), self._ledger.now + self._patience_s)

    def _quiet(self, stream: int) -> None:
        self._ledger.timers.cancel(Silence(stream))

    def _broken(self, session: Session) -> None:
        ledger = self._ledger
        ledger.sessions.broke(session)
        at = ledger.now + ledger.config.grace_s
        ledger.timers.set(Grace(session.session_id), at)

    def _renew(self, session: Session, grant_id: str) -> bool:
        transfer = self._ledger.transfers.get(grant_id)
        if transfer is None or transfer.owner != session.owner:
            return False
        # After hand-off the grant is D's own: known, and nothing to renew.
        return transfer.handed_off or self._ledger.leases.renew(grant_id, self._ledger.now)

    def _owned_by(self, owner: Owner) -> list[Transfer]:
        return [t for t in self._ledger.transfers.values() if t.owner == owner]

    def _lose(self, owner: Owner, why: str) -> None:
        fault = Fault(Reason.PREFILL_LOST, f"prefill {owner.name} is gone: {why}")
        for transfer in self._owned_by(owner):
            if not transfer.handed_off:
                self._ledger.end(transfer, DecodeState.FAILED, fault)
        self._ledger.act(DismissPrefill(owner))

    def _load(self, owner: Owner) -> decode_pb2.Load:
        ledger = self._ledger
        waiting = [t for t in ledger.transfers.values() if t.state is DecodeState.WAITING]
        tokens = sum(t.prefill.request.prompt_tokens for t in waiting if t.prefill is not None)
        times = ledger.serving.times(owner)
        decoding_s, each_s = times.sized_s(ledger.now), times.sized_s_each(ledger.now)
        return decode_pb2.Load(
            free_blocks=ledger.pool.free,
            total_blocks=ledger.pool.total,
            queued_tokens=tokens,
            queued_requests=len(waiting),
            decoding_requests=ledger.scheduler.running,
            decoding=None if decoding_s is None else duration(decoding_s),
            decoding_each=None if each_s is None else duration(each_s),
        )
