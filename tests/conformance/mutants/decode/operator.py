"""D52x: a D whose operator is not heard, or makes things up."""

from __future__ import annotations

import pytest

from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.view import DecodeView
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import admin_pb2, types_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D520")
def the_peer_is_not_told(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, event):  # type: ignore[no-untyped-def]
        transfer = self.find(event.transfer_id, event.attempt)
        fault = Fault(Reason.RELEASED, "released by an operator")
        self.ledger.end(transfer, DecodeState.RELEASED, fault, tell_prefill=False)

    patch.setattr(DecodeMachine, "_operator_released", wrong)
    patch.setattr(Ledger, "tell_again", lambda self, grant_id, session: None)


@mutant("D521")
def whatever_has_ended_was_released(patch: pytest.MonkeyPatch) -> None:
    right = DecodeView.release

    def wrong(self, transfer_id, attempt, reason):  # type: ignore[no-untyped-def]
        info = right(self, transfer_id, attempt, reason)
        if info is not None:
            info.state = types_pb2.TRANSFER_STATE_RELEASED
        return info

    patch.setattr(DecodeView, "release", wrong)


@mutant("D522")
def anything_can_be_released(patch: pytest.MonkeyPatch) -> None:
    right = DecodeView.release

    def wrong(self, transfer_id, attempt, reason):  # type: ignore[no-untyped-def]
        return right(self, transfer_id, attempt, reason) or admin_pb2.TransferInfo()

    patch.setattr(DecodeView, "release", wrong)
