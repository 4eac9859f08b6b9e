"""P6xx: callers that leave and are not let go."""

from __future__ import annotations

import pytest

from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.placement import Placement
from pd_grpc.prefill.requests import Requests
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Fault, Reason
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS as mutant


@mutant("P601")
def those_who_wait_stay(patch: pytest.MonkeyPatch) -> None:
    right = PrefillMachine._call_ended

    def wrong(self, call, now):  # type: ignore[no-untyped-def]
        record = self.requests.of_call(call)
        if record is None or record.state is not PrefillState.QUEUED:
            right(self, call, now)

    patch.setattr(PrefillMachine, "_call_ended", wrong)


@mutant("P602")
def the_allocate_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "_cancel", lambda self, record: None)


@mutant("P603", "P605")
def a_cancelled_request_is_not_released(patch: pytest.MonkeyPatch) -> None:
    right = PrefillMachine._end

    def wrong(self, record, state, fault, tell, now):  # type: ignore[no-untyped-def]
        right(self, record, state, fault, tell and state is not PrefillState.CANCELLED, now)

    patch.setattr(PrefillMachine, "_end", wrong)


@mutant("P604")
def a_caller_that_leaves_is_a_loss(patch: pytest.MonkeyPatch) -> None:
    right = PrefillMachine._end

    def wrong(self, record, state, fault, tell, now):  # type: ignore[no-untyped-def]
        if state is PrefillState.CANCELLED:
            fault = Fault(Reason.PREFILL_LOST, "the caller left")
        right(self, record, state, fault, tell, now)

    patch.setattr(PrefillMachine, "_end", wrong)


@mutant("P605")
def a_cancelled_request_keeps_its_blocks(patch: pytest.MonkeyPatch) -> None:
    right = Requests.return_blocks

    def wrong(self, record):  # type: ignore[no-untyped-def]
        if record.state is not PrefillState.CANCELLED:
            right(self, record)

    patch.setattr(Requests, "return_blocks", wrong)


@mutant("P606")
def the_first_decode_is_released(patch: pytest.MonkeyPatch) -> None:
    right = Placement._release

    def wrong(self, record, cause, now):  # type: ignore[no-untyped-def]
        chosen, record.choice = record.choice, 0
        try:
            right(self, record, cause, now)
        finally:
            record.choice = chosen

    patch.setattr(Placement, "_release", wrong)
