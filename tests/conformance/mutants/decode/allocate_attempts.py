"""D23x: attempts that do not take over as they should."""

from __future__ import annotations

import pytest

from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.tombstones import Tombstones
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D230", "D231", "D234")
def attempts_live_side_by_side(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.create

    def create(self, key, state, budget_s):  # type: ignore[no-untyped-def]
        self._attempts.pop(key.transfer_id, None)
        return right(self, key, state, budget_s)

    patch.setattr(Ledger, "create", create)


@mutant("D231")
def a_transfer_stays_with_its_prefill(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.create
    asking: list[Owner] = []

    def allocate(self, call, request):  # type: ignore[no-untyped-def]
        asking[:] = [self._ledger.sessions.of_call(request.session_id).owner]
        right_allocate(self, call, request)

    def create(self, key, state, budget_s):  # type: ignore[no-untyped-def]
        for known, grant_id in self._by_key.items():
            owner = self.transfers[grant_id].owner
            if known.transfer_id == key.transfer_id and owner not in asking:
                raise Fault(Reason.NOT_OWNER, f"{known} belongs to {owner}")
        return right(self, key, state, budget_s)

    right_allocate = PrefillDesk._allocate
    patch.setattr(PrefillDesk, "_allocate", allocate)
    patch.setattr(Ledger, "create", create)


@mutant("D232", "D233")
def every_attempt_is_welcome(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "newest_attempt", lambda self, transfer_id: 0)


@mutant("D233")
def attempts_are_forgotten_with_their_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tombstones, "newest", lambda self, transfer_id, now: 0)


@mutant("D230", "D234")
def the_attempts_are_not_named(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.end

    def end(self, transfer, state, fault=None, **options):  # type: ignore[no-untyped-def]
        if fault is not None:
            fault = Fault(fault.reason, fault.message)
        right(self, transfer, state, fault, **options)

    patch.setattr(Ledger, "end", end)
