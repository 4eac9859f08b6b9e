"""D50x and D51x: a D that ends transfers wrongly, or forgets how they ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pd_grpc.decode import checks, prefill_desk
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import key_of
from pd_grpc.protocol.tombstones import Tombstones
from pd_grpc.v1 import types_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def cause_is_read(patch: pytest.MonkeyPatch, spoil: Callable[[Fault | None], Fault | None]) -> None:
    """Let the cause of a Release be taken for another."""
    right = prefill_desk._as_fault
    patch.setattr(prefill_desk, "_as_fault", lambda cause: spoil(right(cause)))


def forget(desk: PrefillDesk, ref: types_pb2.TransferRef) -> None:
    """Forget how a transfer ended."""
    desk._ledger.tombstones._records.pop(key_of(ref), None)


@mutant("D501")
def every_release_is_a_loss(patch: pytest.MonkeyPatch) -> None:
    lost = Fault(Reason.PREFILL_LOST, "the prefill gave up")
    cause_is_read(patch, lambda cause: cause or lost)


@mutant("D502")
def a_cause_is_not_passed_on(patch: pytest.MonkeyPatch) -> None:
    cause_is_read(patch, lambda cause: None)


@mutant("D503")
def details_of_a_cause_are_lost(patch: pytest.MonkeyPatch) -> None:
    cause_is_read(patch, lambda cause: None if cause is None else Fault(cause.reason, "P failed"))


@mutant("D504")
def clients_see_every_code(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fault, "for_client", lambda self: self)


@mutant("D505")
def a_foreign_cause_is_an_engine_error(patch: pytest.MonkeyPatch) -> None:
    def spoil(cause: Fault | None) -> Fault | None:
        lost = cause is not None and cause.reason is Reason.PREFILL_LOST
        return Fault(Reason.ENGINE_ERROR, "P failed") if lost else cause

    cause_is_read(patch, spoil)


@mutant("D506")
def released_again_is_released(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._release

    def wrong(self, request):  # type: ignore[no-untyped-def]
        known = self._ledger.of_key(key_of(request.ref))
        state = right(self, request)
        return state if known is not None else types_pb2.TRANSFER_STATE_RELEASED

    patch.setattr(PrefillDesk, "_release", wrong)


@mutant("D507")
def a_late_first_token_is_unknown(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._first_token

    def wrong(self, request):  # type: ignore[no-untyped-def]
        forget(self, request.ref)
        return right(self, request)

    patch.setattr(PrefillDesk, "_first_token", wrong)


@mutant("D508")
def a_late_allocate_is_granted(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._allocate

    def wrong(self, call, request):  # type: ignore[no-untyped-def]
        forget(self, request.ref)
        return right(self, call, request)

    patch.setattr(PrefillDesk, "_allocate", wrong)


@mutant("D509")
def an_unknown_release_leaves_nothing(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._release

    def wrong(self, request):  # type: ignore[no-untyped-def]
        known = self._ledger.of_key(key_of(request.ref))
        state = right(self, request)
        if known is None:
            forget(self, request.ref)
        return state

    patch.setattr(PrefillDesk, "_release", wrong)


@mutant("D510")
def an_allocate_that_waits_is_not_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_answer_allocates", lambda self, transfer, fault: None)


@mutant("D511", tombstone_s=0.3)
def tombstones_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tombstones, "_forget_old", lambda self, now: None)


def any_epoch_is_ours(patch: pytest.MonkeyPatch, zero_only: bool) -> None:
    """Let P name another process of D."""
    right = checks.check_ref

    def wrong(ref: types_pb2.TransferRef, here: types_pb2.Instance, any_epoch: bool) -> None:
        if not zero_only:
            ref.decode_epoch = here.epoch
        right(ref, here, True)

    patch.setattr("pd_grpc.decode.prefill_desk.check_ref", wrong)


@mutant("D514", "D515")
def epochs_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    any_epoch_is_ours(patch, zero_only=False)


@mutant("D516")
def prefills_need_no_epoch(patch: pytest.MonkeyPatch) -> None:
    any_epoch_is_ours(patch, zero_only=True)


@mutant("D517")
def budgets_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "set_budget", lambda self, transfer, until: None)


@mutant("D518")
def whole_answers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = Tombstones.add

    def wrong(self, key, record, now):  # type: ignore[no-untyped-def]
        if record.state is not DecodeState.FINISHED:
            right(self, key, record, now)

    patch.setattr(Tombstones, "add", wrong)


@mutant("D519")
def blocks_in_quarantine_stay_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "stopped_writing", lambda self, grant_id, writer: None)
