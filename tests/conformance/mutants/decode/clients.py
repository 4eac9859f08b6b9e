"""D60x and D61x: a D that does not bring clients and their hand-overs together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.decode.handoff import HandOff
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.outbox import TokenOutbox
from pd_grpc.decode.scheduler import Scheduler
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import key_of
from pd_grpc.v1 import inference_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def before_attach(patch: pytest.MonkeyPatch, spoil: Callable[[Any, Any], None]) -> None:
    """Let `spoil(desk, transfer)` before a client is brought to its transfer, which may be None."""
    right = ClientDesk._attach

    def wrong(self, event, sampling):  # type: ignore[no-untyped-def]
        spoil(self, self._ledger.of_key(key_of(event.request.handoff.ref)))
        right(self, event, sampling)

    patch.setattr(ClientDesk, "_attach", wrong)


@mutant("D601")
def clients_must_come_second(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, transfer: Any) -> None:
        if transfer is None:
            raise Fault(Reason.UNKNOWN_TRANSFER, "no prefill has asked for it")

    before_attach(patch, spoil)


@mutant("D602")
def clients_must_come_first(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, transfer: Any) -> None:
        if transfer is not None and transfer.prefill is not None:
            raise Fault(Reason.WRONG_STATE, "the prefill was first")

    before_attach(patch, spoil)


@mutant("D603")
def the_newest_client_is_the_right_one(patch: pytest.MonkeyPatch) -> None:
    def spoil(self: Any, transfer: Any) -> None:
        if transfer is not None:
            transfer.client = None

    before_attach(patch, spoil)


@mutant("D604")
def request_ids_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClientDesk, "_remember", lambda self, request, transfer: None)


@mutant("D605", attach_s=0.3)
def an_absent_client_is_a_release(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, transfer):  # type: ignore[no-untyped-def]
        self._ledger.end(transfer, DecodeState.RELEASED)

    patch.setattr(HandOff, "nobody_came", wrong)


@mutant("D606", attach_s=0.3)
def p_does_not_hear_of_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_tell", lambda self, session, key, state, fault: None)


@mutant("D607")
def it_decodes_for_nobody(patch: pytest.MonkeyPatch) -> None:
    right = HandOff._try

    def wrong(self, transfer):  # type: ignore[no-untyped-def]
        right(self, transfer)
        if transfer.handed_off and transfer.state is DecodeState.READY:
            self._ledger.move(transfer, DecodeState.DECODING)

    patch.setattr(HandOff, "_try", wrong)


@mutant("D608")
def every_end_was_a_release(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, call, key, ended, client):  # type: ignore[no-untyped-def]
        raise Fault(Reason.RELEASED, f"{key} has ended")

    patch.setattr(ClientDesk, "_too_late", wrong)


@mutant("D609")
def what_has_ended_is_unknown(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, call, key, ended, client):  # type: ignore[no-untyped-def]
        raise ended.fault or Fault(Reason.UNKNOWN_TRANSFER, f"{key} is unknown")

    patch.setattr(ClientDesk, "_too_late", wrong)


@mutant("D610")
def what_is_not_sent_at_the_end_is_lost(patch: pytest.MonkeyPatch) -> None:
    right = TokenOutbox.finish

    def wrong(self, reason, usage, timings):  # type: ignore[no-untyped-def]
        self._tokens.clear()
        right(self, reason, usage, timings)

    patch.setattr(TokenOutbox, "finish", wrong)


@mutant("D610")
def every_token_is_a_message(patch: pytest.MonkeyPatch) -> None:
    def wrong(self):  # type: ignore[no-untyped-def]
        token = self._tokens.pop(0)
        message = inference_pb2.GenerateResponse(token_ids=[token.token_id])
        if self._tokens:
            self._ready.set()
        elif self._end is not None:
            message.MergeFrom(self._end)
            self._end = None
        return message

    patch.setattr(TokenOutbox, "_message", wrong)


@mutant("D611")
def local_answers_are_greedy(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler._sample

    def wrong(self, transfer):  # type: ignore[no-untyped-def]
        spec = right(self, transfer)
        if transfer.local:
            return replace(spec, sampling=replace(spec.sampling, temperature=0.0))
        return spec

    patch.setattr(Scheduler, "_sample", wrong)


@mutant("D612")
def local_output_given_counts_as_prompt(patch: pytest.MonkeyPatch) -> None:
    right = ClientDesk._leg

    def wrong(self, event, sampling):  # type: ignore[no-untyped-def]
        leg = right(self, event, sampling)
        if not event.request.HasField("handoff"):
            leg.prompt, leg.generated = leg.prompt + leg.generated, []
        return leg

    patch.setattr(ClientDesk, "_leg", wrong)
