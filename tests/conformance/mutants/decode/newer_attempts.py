"""D54x: a D that mixes up the attempts of a transfer."""

from __future__ import annotations

import pytest

from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.receiver import Receiver
from pd_grpc.protocol.faults import Fault, Reason
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def newest_is_meant(patch: pytest.MonkeyPatch, method: str) -> None:
    """Take every call of a transfer for one of its newest attempt."""
    right = getattr(PrefillDesk, method)

    def wrong(self, request):  # type: ignore[no-untyped-def]
        newest = self._ledger.newest_attempt(request.ref.transfer_id)
        request.ref.attempt = newest or request.ref.attempt
        return right(self, request)

    patch.setattr(PrefillDesk, method, wrong)


@mutant("D540")
def older_attempts_live_on(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.create

    def wrong(self, key, state, budget_s):  # type: ignore[no-untyped-def]
        self._attempts.pop(key.transfer_id, None)
        return right(self, key, state, budget_s)

    patch.setattr(Ledger, "create", wrong)


@mutant("D541", "D542", "D543")
def attempts_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "check_attempt", lambda self, key: None)


@mutant("D544")
def first_tokens_are_for_the_newest(patch: pytest.MonkeyPatch) -> None:
    newest_is_meant(patch, "_first_token")


@mutant("D545")
def releases_are_for_the_newest(patch: pytest.MonkeyPatch) -> None:
    newest_is_meant(patch, "_release")


@mutant("D546")
def superseded_streams_are_released(patch: pytest.MonkeyPatch) -> None:
    right = Receiver.close_grant

    def wrong(self, grant_id, fault, now):  # type: ignore[no-untyped-def]
        return right(self, grant_id, Fault(Reason.RELEASED, fault.message), now)

    patch.setattr(Receiver, "close_grant", wrong)
