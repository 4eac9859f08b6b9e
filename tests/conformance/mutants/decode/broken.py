"""D17x: broken sessions and goodbyes gone wrong."""

from __future__ import annotations

import pytest

from pd_grpc.decode import actions as act
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault, Reason
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D170", "D173")
def a_break_is_the_end(patch: pytest.MonkeyPatch) -> None:
    def broken(self, session):  # type: ignore[no-untyped-def]
        self._ledger.sessions.forget(session)
        self._lose(session.owner, "its session broke")

    patch.setattr(SessionDesk, "_broken", broken)


@mutant("D171")
def a_break_is_noticed_by_the_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SessionDesk, "session_over", lambda self, session_id: None)


@mutant("D172")
def a_broken_session_is_unknown(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk._broken

    def broken(self, session):  # type: ignore[no-untyped-def]
        right(self, session)
        self._ledger.sessions._by_id.pop(session.session_id)

    patch.setattr(SessionDesk, "_broken", broken)


@mutant("D173")
def no_more_to_say_is_goodbye(patch: pytest.MonkeyPatch) -> None:
    def stream_ended(self, event):  # type: ignore[no-untyped-def]
        session = self._ledger.sessions.of_stream(event.stream)
        if session is not None:
            self._ledger.sessions.forget(session)
            self._lose(session.owner, "it has nothing more to say")

    patch.setattr(SessionDesk, "stream_ended", stream_ended)


@mutant("D174")
def goodbye_is_taken_for_a_break(patch: pytest.MonkeyPatch) -> None:
    def goodbye(self, event):  # type: ignore[no-untyped-def]
        self._broken(self._ledger.sessions.of_stream(event.stream))
        self._ledger.act(act.SessionEnd(event.stream, None))

    patch.setattr(SessionDesk, "goodbye", goodbye)


@mutant("D175")
def goodbye_is_a_fault(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.goodbye

    def goodbye(self, event):  # type: ignore[no-untyped-def]
        fault = Fault(Reason.PREFILL_LOST, "it said goodbye")
        self._ledger.act(act.SessionEnd(event.stream, fault))
        right(self, event)

    patch.setattr(SessionDesk, "goodbye", goodbye)


@mutant("D176")
def who_waits_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk._owned_by

    def owned_by(self, owner):  # type: ignore[no-untyped-def]
        return [t for t in right(self, owner) if t.state is not DecodeState.WAITING]

    patch.setattr(SessionDesk, "_owned_by", owned_by)


@mutant("D177")
def goodbye_takes_everything(patch: pytest.MonkeyPatch) -> None:
    def lose(self, owner, why):  # type: ignore[no-untyped-def]
        for transfer in self._owned_by(owner):
            fault = Fault(Reason.PREFILL_LOST, why)
            self._ledger.end(transfer, DecodeState.FAILED, fault)

    patch.setattr(SessionDesk, "_lose", lose)
