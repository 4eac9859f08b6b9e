"""P1xx: sessions gone wrong."""

from __future__ import annotations

from typing import Any

import pytest

from pd_grpc.prefill import sessions, welcomes
from pd_grpc.prefill.conversations import Conversations
from pd_grpc.prefill.peer import DecodePeer
from pd_grpc.prefill.sessions import DecodeSession
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.v1 import types_pb2
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS as mutant
from tests.conformance.mutants.prefill.wire import before_call


@mutant("P101")
def hello_in_another_role(patch: pytest.MonkeyPatch) -> None:
    right = Conversations._hello

    def wrong(self, name):  # type: ignore[no-untyped-def]
        hello = right(self, name)
        hello.instance.role = types_pb2.ROLE_DECODE
        return hello

    patch.setattr(Conversations, "_hello", wrong)


@mutant("P102")
def hello_to_whoever_answers(patch: pytest.MonkeyPatch) -> None:
    right = Conversations._hello
    patch.setattr(Conversations, "_hello", lambda self, name: right(self, ""))


@mutant("P103")
def hello_with_another_model(patch: pytest.MonkeyPatch) -> None:
    right = Conversations._hello

    def wrong(self, name):  # type: ignore[no-untyped-def]
        hello = right(self, name)
        hello.layouts[0].model = "another"
        return hello

    patch.setattr(Conversations, "_hello", wrong)
    patch.setattr(KvLayout, "differences", lambda self, theirs: [])


@mutant("P104")
def each_session_is_opened_twice(patch: pytest.MonkeyPatch) -> None:
    right = DecodePeer.open_session

    def wrong(self, opened):  # type: ignore[no-untyped-def]
        right(self, opened)
        right(self, opened)

    patch.setattr(DecodePeer, "open_session", wrong)


@mutant("P105")
def the_first_token_has_no_session(patch: pytest.MonkeyPatch) -> None:
    before_call(patch, "send_first_token", lambda request: request.ClearField("session_id"))


@mutant("P106")
def the_callers_epoch_is_passed_on(patch: pytest.MonkeyPatch) -> None:
    before_call(patch, "release", lambda request: request.ref.ClearField("decode_epoch"))


@mutant("P107")
def heartbeats_by_ones_own_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeSession, "_heartbeat_s", property(lambda self: 30.0))


@mutant("P108")
def heartbeats_count_over_all_sessions(patch: pytest.MonkeyPatch) -> None:
    right = DecodeSession._welcomed

    def wrong(self, welcome, now):  # type: ignore[no-untyped-def]
        # A second session goes on where the first one left off.
        before = self._sequence
        out = right(self, welcome, now)
        self._sequence += before
        return out

    patch.setattr(DecodeSession, "_welcomed", wrong)


@mutant("P109")
def heartbeats_list_one_grant(patch: pytest.MonkeyPatch) -> None:
    right: Any = DecodeSession._beat

    def wrong(self, now):  # type: ignore[no-untyped-def]
        (send,) = right(self, now)
        del send.message.heartbeat.grant_ids[1:]
        return [send]

    patch.setattr(DecodeSession, "_beat", wrong)


@mutant("P110", "P607")
def grants_are_listed_for_ever(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, user, now):  # type: ignore[no-untyped-def]
        self._users.discard(user)
        return []

    patch.setattr(DecodeSession, "unbind", wrong)


@mutant("P111")
def silence_is_borne(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "SILENT_HEARTBEATS", 1000)


@mutant("P112")
def a_new_session_begins_with_nothing(patch: pytest.MonkeyPatch) -> None:
    right = DecodeSession._welcomed

    def wrong(self, welcome, now):  # type: ignore[no-untyped-def]
        self.grants.clear()
        return right(self, welcome, now)

    patch.setattr(DecodeSession, "_welcomed", wrong)


@mutant("P113")
def grace_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeSession, "_out_of_grace", lambda self: [])


@mutant("P114")
def the_first_epoch_is_kept(patch: pytest.MonkeyPatch) -> None:
    right = DecodeSession._welcomed

    def wrong(self, welcome, now):  # type: ignore[no-untyped-def]
        welcome.instance.epoch = self.instance.epoch or welcome.instance.epoch
        return right(self, welcome, now)

    patch.setattr(DecodeSession, "_welcomed", wrong)


@mutant("P115")
def any_layout_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvLayout, "differences", lambda self, theirs: [])


@mutant("P116")
def reserved_features_are_ignored(patch: pytest.MonkeyPatch) -> None:
    right = welcomes.objection

    def wrong(welcome, *ours):  # type: ignore[no-untyped-def]
        welcome.first_token_by_decode = False
        return right(welcome, *ours)

    patch.setattr(sessions, "objection", wrong)


@mutant("P117")
def goodbye_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    deaf_to(patch, "goodbye")


@mutant("P118")
def unknown_messages_break_the_session(patch: pytest.MonkeyPatch) -> None:
    right = DecodeSession.message

    def wrong(self, link, message, now):  # type: ignore[no-untyped-def]
        if message.WhichOneof("message") is None:
            return self._misspoke("a message of no known kind came", now)
        return right(self, link, message, now)

    patch.setattr(DecodeSession, "message", wrong)


def deaf_to(patch: pytest.MonkeyPatch, kind: str) -> None:
    """P does not hear one kind of message of a session."""
    right = DecodeSession.message

    def wrong(self, link, message, now):  # type: ignore[no-untyped-def]
        if message.WhichOneof("message") == kind:
            return []
        return right(self, link, message, now)

    patch.setattr(DecodeSession, "message", wrong)
