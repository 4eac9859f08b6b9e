"""D11x: heartbeats gone wrong."""

from __future__ import annotations

from itertools import count

import pytest

from pd_grpc.blocks.leases import Leases
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.scheduler import Scheduler
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault, Reason
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D110")
def heartbeats_renew_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "renew", lambda self, grant_id, now: True)


@mutant("D110")
def heartbeats_renew_everything(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.heartbeat

    def heartbeat(self, event):  # type: ignore[no-untyped-def]
        for transfer in self._ledger.transfers.values():
            self._ledger.leases.renew(transfer.grant_id, self._ledger.now)
        right(self, event)

    patch.setattr(SessionDesk, "heartbeat", heartbeat)


@mutant("D111")
def acks_count_for_themselves(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.heartbeat
    numbers = count(1)

    def heartbeat(self, event):  # type: ignore[no-untyped-def]
        event.heartbeat.sequence = next(numbers)
        right(self, event)

    patch.setattr(SessionDesk, "heartbeat", heartbeat)


@mutant("D112")
def every_grant_is_known(patch: pytest.MonkeyPatch) -> None:
    def known(self, session, grant_id):  # type: ignore[no-untyped-def]
        self._ledger.leases.renew(grant_id, self._ledger.now)
        return True

    patch.setattr(SessionDesk, "_renew", known)


@mutant("D112", "D113")
def anybody_renews(patch: pytest.MonkeyPatch) -> None:
    def renew(self, session, grant_id):  # type: ignore[no-untyped-def]
        return self._ledger.leases.renew(grant_id, self._ledger.now)

    patch.setattr(SessionDesk, "_renew", renew)


@mutant("D114")
def a_grant_is_known_by_its_lease(patch: pytest.MonkeyPatch) -> None:
    def renew(self, session, grant_id):  # type: ignore[no-untyped-def]
        transfer = self._ledger.transfers.get(grant_id)
        mine = transfer is not None and transfer.owner == session.owner
        return mine and self._ledger.leases.renew(grant_id, self._ledger.now)

    patch.setattr(SessionDesk, "_renew", renew)


@mutant("D115")
def an_expired_grant_has_failed(patch: pytest.MonkeyPatch) -> None:
    def lease_expired(self, grant_id):  # type: ignore[no-untyped-def]
        fault = Fault(Reason.PREFILL_LOST, "nobody renewed it")
        self._ledger.end(self._ledger.transfers[grant_id], DecodeState.FAILED, fault)

    patch.setattr(PrefillDesk, "lease_expired", lease_expired)


@mutant("D115")
def a_lease_ends_at_half_its_time(patch: pytest.MonkeyPatch) -> None:
    right = Leases.__init__
    patch.setattr(Leases, "__init__", lambda self, life_s: right(self, life_s / 2))


@mutant("D116")
def the_load_is_told_once(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.heartbeat

    def heartbeat(self, event):  # type: ignore[no-untyped-def]
        session = self._ledger.sessions.of_stream(event.stream)
        if session is not None and session.load is not None:
            session.load = self._load(session.owner)
        right(self, event)

    patch.setattr(SessionDesk, "heartbeat", heartbeat)


@mutant("D117")
def who_waits_is_counted_without_its_tokens(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk._load

    def load(self, owner):  # type: ignore[no-untyped-def]
        found = right(self, owner)
        found.queued_tokens = found.queued_requests
        return found

    patch.setattr(SessionDesk, "_load", load)


@mutant("D118")
def silence_is_golden(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SessionDesk, "_expect_heartbeat", lambda self, stream: None)


@mutant("D118")
def one_period_of_silence_is_too_much(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk._expect_heartbeat

    def expect(self, stream):  # type: ignore[no-untyped-def]
        now = self._ledger.now
        self._ledger.now -= self._ledger.config.heartbeat_s
        right(self, stream)
        self._ledger.now = now

    patch.setattr(SessionDesk, "_expect_heartbeat", expect)


@mutant("D119")
def only_hello_is_a_sign_of_life(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.heartbeat

    def heartbeat(self, event):  # type: ignore[no-untyped-def]
        expect = self._expect_heartbeat
        self._expect_heartbeat = lambda stream: None
        right(self, event)
        self._expect_heartbeat = expect

    patch.setattr(SessionDesk, "heartbeat", heartbeat)


@mutant("D129")
def nobody_decodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "running", 0)
