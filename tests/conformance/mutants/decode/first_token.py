"""D40x to D41x: a D that treats the first token wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.decode.handoff import HandOff, token_out
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.receiver import Receiver
from pd_grpc.decode.sessions import Sessions
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault, Reason, stage_deadline
from pd_grpc.protocol.refs import key_of
from pd_grpc.v1 import decode_pb2, types_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def before_check(patch: pytest.MonkeyPatch, spoil: Callable[..., None]) -> None:
    """Let `spoil(desk, transfer, request)` before a first token is checked."""
    right = PrefillDesk._check_first

    def wrong(self, transfer, request):  # type: ignore[no-untyped-def]
        spoil(self, transfer, request)
        right(self, transfer, request)

    patch.setattr(PrefillDesk, "_check_first", wrong)


def before_first_token(patch: pytest.MonkeyPatch, spoil: Callable[..., None]) -> None:
    """Let `spoil(desk, request)` before a first token is looked at."""
    right = PrefillDesk._first_token

    def wrong(self, request):  # type: ignore[no-untyped-def]
        spoil(self, request)
        return right(self, request)

    patch.setattr(PrefillDesk, "_first_token", wrong)


@mutant("D401")
def the_first_token_waits_for_the_kv(patch: pytest.MonkeyPatch) -> None:
    show, completed = HandOff._show_first, HandOff.kv_completed

    def wrong_show(self, transfer, *, tell_prefill):  # type: ignore[no-untyped-def]
        return transfer.kv_complete and show(self, transfer, tell_prefill=tell_prefill)

    def wrong_completed(self, transfer):  # type: ignore[no-untyped-def]
        completed(self, transfer)
        show(self, transfer, tell_prefill=True)

    patch.setattr(HandOff, "_show_first", wrong_show)
    patch.setattr(HandOff, "kv_completed", wrong_completed)


@mutant("D402")
def the_first_chunk_completes_the_kv(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, event):  # type: ignore[no-untyped-def]
        transfer = self._receiving(event.grant_id)
        if transfer is not None:
            self._handoff.kv_completed(transfer)

    patch.setattr(DecodeMachine, "_receive_progress", wrong)


@mutant("D403")
def only_kv_starts_the_decode(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, transfer, first):  # type: ignore[no-untyped-def]
        transfer.first = first
        self._show_first(transfer, tell_prefill=False)

    patch.setattr(HandOff, "first_token", wrong)


@mutant("D404")
def a_repeated_token_is_shown_again(patch: pytest.MonkeyPatch) -> None:
    right = HandOff.first_token

    def wrong(self, transfer, first):  # type: ignore[no-untyped-def]
        if transfer.first is not None:
            self.push(transfer, token_out(first))
        right(self, transfer, first)

    patch.setattr(HandOff, "first_token", wrong)


@mutant("D405")
def another_token_is_overlooked(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, transfer: Any, request: Any) -> None:
        if transfer.first is not None:
            request.tokens[0].CopyFrom(transfer.first)

    before_check(patch, spoil)


@mutant("D406")
def any_number_is_a_token(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, transfer: Any, request: Any) -> None:
        self._limits = replace(self._limits, vocab_size=1 << 32)

    before_check(patch, spoil)


@mutant("D407")
def the_first_of_several_is_taken(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, transfer: Any, request: Any) -> None:
        del request.tokens[1:]

    before_check(patch, spoil)


@mutant("D408")
def siblings_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, transfer: Any, request: Any) -> None:
        for token in request.tokens:
            token.sibling = 0

    before_check(patch, spoil)


@mutant("D409")
def any_grant_will_do(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, request: Any) -> None:
        transfer = self._ledger.of_key(key_of(request.ref))
        if transfer is not None:
            request.grant_id = transfer.grant_id

    before_first_token(patch, spoil)


@mutant("D410")
def a_grant_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, request: Any) -> None:
        transfer = self._ledger.of_key(key_of(request.ref))
        if transfer is not None and transfer.state is DecodeState.WAITING:
            transfer.prefill.response = decode_pb2.AllocateResponse()
            request.grant_id = transfer.grant_id

    before_first_token(patch, spoil)


@mutant("D411")
def an_unknown_transfer_is_called_released(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._first_token

    def wrong(self, request):  # type: ignore[no-untyped-def]
        try:
            return right(self, request)
        except Fault as fault:
            if fault.reason is not Reason.UNKNOWN_TRANSFER:
                raise
            return types_pb2.TRANSFER_STATE_RELEASED

    patch.setattr(PrefillDesk, "_first_token", wrong)


@mutant("D412", "D512")
def every_prefill_owns_every_transfer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillDesk, "_owned", lambda self, transfer, session: None)


@mutant("D413", "D513")
def superseded_sessions_stay_known(patch: pytest.MonkeyPatch) -> None:
    right = Sessions.forget

    def wrong(self, session):  # type: ignore[no-untyped-def]
        right(self, session)
        self._by_id[session.session_id] = session

    patch.setattr(Sessions, "forget", wrong)


@mutant("D414")
def a_finish_reason_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    right = HandOff.first_token

    def wrong(self, transfer, first):  # type: ignore[no-untyped-def]
        first.finish_reason = 0
        right(self, transfer, first)

    patch.setattr(HandOff, "first_token", wrong)


@mutant("D415")
def the_stream_of_a_complete_answer_stays_open(patch: pytest.MonkeyPatch) -> None:
    right = Receiver.close_grant

    def wrong(self, grant_id, fault, now):  # type: ignore[no-untyped-def]
        for incoming in self._grants[grant_id].incoming.values():
            incoming.stream = None
        return right(self, grant_id, fault, now)

    patch.setattr(Receiver, "close_grant", wrong)


@mutant("D416")
def no_answer_is_kept(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, call, key, ended, client):  # type: ignore[no-untyped-def]
        raise ended.fault or Fault(Reason.RELEASED, f"{key} has ended")

    patch.setattr(ClientDesk, "_too_late", wrong)


@mutant("D417")
def a_request_without_kv_waits_for_blocks(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._enter_queue

    def wrong(self, transfer, max_wait_s):  # type: ignore[no-untyped-def]
        transfer.prefill.request.kv_needed = True
        return right(self, transfer, max_wait_s)

    patch.setattr(PrefillDesk, "_enter_queue", wrong)


@mutant("D418")
def a_finish_reason_is_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, transfer: Any, request: Any) -> None:
        transfer.prefill.request.kv_needed = True

    before_check(patch, spoil)


@mutant("D419", first_token_s=0.3)
def the_wrong_stage_is_named(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, transfer):  # type: ignore[no-untyped-def]
        self._ledger.end(transfer, DecodeState.FAILED, stage_deadline("transfer"))

    patch.setattr(HandOff, "no_first_token", wrong)
