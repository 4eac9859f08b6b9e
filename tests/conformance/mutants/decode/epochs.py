"""D15x: processes and sessions of one P that do not take over as they should."""

from __future__ import annotations

import pytest

from pd_grpc.decode import actions as act
from pd_grpc.decode import session_ids
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.runtime import DecodeRuntime
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.decode.sessions import Sessions
from pd_grpc.protocol.faults import Fault, Reason
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D150", "D151")
def no_epoch_is_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sessions, "_remember", lambda self, owner: None)


@mutant("D151")
def an_epoch_is_forgotten_with_its_session(patch: pytest.MonkeyPatch) -> None:
    right = Sessions.forget

    def forget(self, session):  # type: ignore[no-untyped-def]
        right(self, session)
        self._newest.pop(session.owner.name, None)

    patch.setattr(Sessions, "forget", forget)


@mutant("D152")
def the_old_process_is_thought_alive(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk._lose

    def lose(self, owner, why):  # type: ignore[no-untyped-def]
        if "replaced" not in why:
            right(self, owner, why)

    patch.setattr(SessionDesk, "_lose", lose)


@mutant("D153", "D154")
def superseded_sessions_go_on(patch: pytest.MonkeyPatch) -> None:
    right = DecodeRuntime._to_session

    def to_session(self, action):  # type: ignore[no-untyped-def]
        ends = isinstance(action, act.SessionEnd) and action.fault is not None
        if not (ends and action.fault.reason is Reason.SUPERSEDED):
            right(self, action)

    patch.setattr(DecodeRuntime, "_to_session", to_session)


@mutant("D154")
def a_second_session_is_one_too_many(patch: pytest.MonkeyPatch) -> None:
    right = Sessions.join

    def join(self, stream, hello, session_id):  # type: ignore[no-untyped-def]
        known = self._by_name.get(hello.instance.name)
        if known is not None and known.owner.epoch == hello.instance.epoch:
            raise Fault(Reason.WRONG_STATE, "this prefill has a session")
        return right(self, stream, hello, session_id)

    patch.setattr(Sessions, "join", join)


@mutant("D155")
def session_ids_are_good_for_ever(patch: pytest.MonkeyPatch) -> None:
    right = Sessions.forget

    def forget(self, session):  # type: ignore[no-untyped-def]
        right(self, session)
        self._by_id[session.session_id] = session

    patch.setattr(Sessions, "forget", forget)


@mutant("D156")
def transfers_need_the_newest_session(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session_ids, "IDS_KEPT", 1)


@mutant("D156")
def transfers_take_every_session_there_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session_ids, "IDS_KEPT", 1000)


@mutant("D157")
def a_new_session_begins_anew(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.hello

    def hello(self, event):  # type: ignore[no-untyped-def]
        known = self._ledger.sessions._by_name.get(event.hello.instance.name)
        if known is not None:
            self._lose(known.owner, "it opened another session")
        right(self, event)

    patch.setattr(SessionDesk, "hello", hello)


@mutant("D158")
def a_new_session_renews_nothing(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.hello

    def hello(self, event):  # type: ignore[no-untyped-def]
        owned = self._owned_by
        self._owned_by = lambda owner: []
        right(self, event)
        self._owned_by = owned

    patch.setattr(SessionDesk, "hello", hello)


@mutant("D159")
def the_end_of_any_session_is_the_end(patch: pytest.MonkeyPatch) -> None:
    right_hello, right_ended = SessionDesk.hello, SessionDesk.stream_ended
    names: dict[int, str] = {}

    def hello(self, event):  # type: ignore[no-untyped-def]
        names[event.stream] = event.hello.instance.name
        right_hello(self, event)

    def stream_ended(self, event):  # type: ignore[no-untyped-def]
        session = self._ledger.sessions._by_name.get(names.get(event.stream))
        if session is not None:
            self._broken(session)
        right_ended(self, event)

    patch.setattr(SessionDesk, "hello", hello)
    patch.setattr(SessionDesk, "stream_ended", stream_ended)


@mutant("D160")
def nobody_owns_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillDesk, "_owned", lambda self, transfer, session: None)
