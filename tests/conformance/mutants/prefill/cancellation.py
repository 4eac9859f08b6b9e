"""P6xx: callers that leave and are not let go."""

from __future__ import annotations

import pytest

from pd_grpc.prefill.compute import Compute
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


@mutant("P608", sim_time_scale=20.0)
def a_cancelled_request_is_computed_to_the_end(patch: pytest.MonkeyPatch) -> None:
    forget, done, return_blocks = Compute.forget, Compute.done, Requests.return_blocks
    left = set()

    def keep(self, record):  # type: ignore[no-untyped-def]
        if record.state is PrefillState.COMPUTING:
            left.add(record.key)
        else:
            forget(self, record)

    def wait(self, record):  # type: ignore[no-untyped-def]
        if record.key not in left:
            return_blocks(self, record)

    def go_on(self, step, results, now):  # type: ignore[no-untyped-def]
        plan = self._plan
        done(self, step, results, now)
        for record, chunk, sampled in zip(plan.records, plan.chunks, results, strict=True):
            if record.key in left:
                record.computed = chunk.start + len(chunk.token_ids)
                if sampled is not None:
                    left.remove(record.key)
                    forget(self, record)
                    return_blocks(self._requests, record)

    patch.setattr(Compute, "forget", keep)
    patch.setattr(Requests, "return_blocks", wait)
    patch.setattr(Compute, "done", go_on)
