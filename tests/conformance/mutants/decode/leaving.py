"""D62x and D63x: a D that does not notice that its client is gone, or its time over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Transfer
from pd_grpc.protocol import rpc
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def overlook_leaving(patch: pytest.MonkeyPatch, when: Callable[[Any], bool]) -> None:
    """Go on without a client where `when(transfer)` says so."""
    right = ClientDesk.call_ended

    def wrong(self, event):  # type: ignore[no-untyped-def]
        transfer = self._ledger.of_call(event.call)
        if transfer is None or not when(transfer):
            right(self, event)

    patch.setattr(ClientDesk, "call_ended", wrong)


@mutant("D620")
def a_client_that_left_leaves_nothing(patch: pytest.MonkeyPatch) -> None:
    right = ClientDesk.call_ended

    def wrong(self, event):  # type: ignore[no-untyped-def]
        transfer = self._ledger.of_call(event.call)
        right(self, event)
        if transfer is not None:
            del self._ledger.tombstones._records[transfer.key]

    patch.setattr(ClientDesk, "call_ended", wrong)


@mutant("D621")
def an_allocate_hears_no_cause(patch: pytest.MonkeyPatch) -> None:
    right = Ledger._answer_allocates
    patch.setattr(
        Ledger, "_answer_allocates", lambda self, transfer, _: right(self, transfer, None)
    )


@mutant("D622")
def ends_of_grants_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_tell", lambda self, session, key, state, fault: None)


@mutant("D623")
def a_stream_is_told_and_the_session_is_not(patch: pytest.MonkeyPatch) -> None:
    right = Ledger._tell_prefill

    def wrong(self, transfer, fault):  # type: ignore[no-untyped-def]
        if not transfer.receiving:
            right(self, transfer, fault)

    patch.setattr(Ledger, "_tell_prefill", wrong)
    patch.setattr(Ledger, "tell_again", lambda self, grant_id, session: None)


@mutant("D624")
def a_client_may_leave_while_ready(patch: pytest.MonkeyPatch) -> None:
    overlook_leaving(patch, lambda transfer: transfer.state is DecodeState.READY)


@mutant("D625")
def what_decodes_goes_on(patch: pytest.MonkeyPatch) -> None:
    overlook_leaving(patch, lambda transfer: transfer.handed_off)


@mutant("D630")
def the_budget_is_longer_than_the_call(patch: pytest.MonkeyPatch) -> None:
    right = rpc.budget_of
    patch.setattr(rpc, "budget_of", lambda context, timeouts: right(context, timeouts) + 1)


@mutant("D631", "D633", "D634")
def every_stage_is_called_transfer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transfer, "stage", property(lambda self: "transfer"))


@mutant("D632")
def a_budget_stays_what_it_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "narrow_budget", lambda self, transfer, budget_s: None)
