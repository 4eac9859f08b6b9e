"""D44x: a D whose transfers are still P's after the hand-off."""

from __future__ import annotations

import pytest

from pd_grpc.decode.handoff import HandOff
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import key_of
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant

LOST = Fault(Reason.PREFILL_LOST, "the prefill is gone")


def end_all(desk: SessionDesk, name: str) -> None:
    """What a lost P takes with it, handed off or not."""
    for transfer in list(desk._ledger.transfers.values()):
        if transfer.owner is not None and transfer.owner.name == name:
            desk._ledger.end(transfer, DecodeState.FAILED, LOST)


@mutant("D440")
def release_always_releases(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._release

    def wrong(self, request):  # type: ignore[no-untyped-def]
        transfer = self._ledger.of_key(key_of(request.ref))
        if transfer is not None:
            transfer.handed_off_at = None
        return right(self, request)

    patch.setattr(PrefillDesk, "_release", wrong)


@mutant("D441")
def goodbye_ends_all_transfers(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.goodbye

    def wrong(self, event):  # type: ignore[no-untyped-def]
        session = self._ledger.sessions.of_stream(event.stream)
        right(self, event)
        end_all(self, session.owner.name)

    patch.setattr(SessionDesk, "goodbye", wrong)


@mutant("D442")
def a_lost_prefill_ends_all_transfers(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.session_over

    def wrong(self, session_id):  # type: ignore[no-untyped-def]
        session = self._ledger.sessions.of_call(session_id)
        right(self, session_id)
        end_all(self, session.owner.name)

    patch.setattr(SessionDesk, "session_over", wrong)


@mutant("D443")
def a_newer_process_ends_all_transfers(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.hello

    def wrong(self, event):  # type: ignore[no-untyped-def]
        end_all(self, event.hello.instance.name)
        right(self, event)

    patch.setattr(SessionDesk, "hello", wrong)


@mutant("D444")
def the_lease_goes_on(patch: pytest.MonkeyPatch) -> None:
    right = HandOff._try

    def wrong(self, transfer):  # type: ignore[no-untyped-def]
        right(self, transfer)
        if transfer.handed_off:
            self._ledger.leases.start(transfer.grant_id, self._ledger.now)

    patch.setattr(HandOff, "_try", wrong)


@mutant("D445")
def a_grant_without_a_lease_is_unknown(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, session, grant_id):  # type: ignore[no-untyped-def]
        return self._ledger.leases.renew(grant_id, self._ledger.now)

    patch.setattr(SessionDesk, "_renew", wrong)
