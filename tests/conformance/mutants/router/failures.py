"""R40x: failures told wrongly, or not at all."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.faults import Code, Fault, Reason, transport_fault
from pd_grpc.router import machine
from pd_grpc.router.machine import CancelPrefill, PrefillLeg, RoutedRequest
from pd_grpc.router.runtime import RoutedCall
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R401")
def codes_between_instances_for_clients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fault, "for_client", lambda self: self)


@mutant("R402")
def a_failure_of_decode_is_its_loss(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, error):  # type: ignore[no-untyped-def]
        return Fault(Reason.DECODE_LOST, str(error))

    patch.setattr(RoutedRequest, "_of_decode", wrong)


@mutant("R403")
def failures_without_details(patch: pytest.MonkeyPatch) -> None:
    right = RoutedRequest._of_leg

    def wrong(self, *arguments):  # type: ignore[no-untyped-def]
        fault = right(self, *arguments)
        return Fault(fault.reason, fault.message, fault.metadata)

    patch.setattr(RoutedRequest, "_of_leg", wrong)


@mutant("R404")
def prefill_computes_on(patch: pytest.MonkeyPatch) -> None:
    end, close = RoutedRequest._end, RoutedCall.close

    def without_prefill(self):  # type: ignore[no-untyped-def]
        return [action for action in end(self) if not isinstance(action, CancelPrefill)]

    async def leave_the_readers(self):  # type: ignore[no-untyped-def]
        self._tasks = set()
        await close(self)

    patch.setattr(RoutedRequest, "_end", without_prefill)
    patch.setattr(RoutedCall, "close", leave_the_readers)


@mutant("R405")
def what_waits_is_dropped_at_a_failure(patch: pytest.MonkeyPatch) -> None:
    right = RoutedCall.next_message

    async def wrong(self):  # type: ignore[no-untyped-def]
        # As one that gathers several tokens before it writes.
        while len(self._outbox._token_ids) < 4 and not self._machine.ended:
            self._wake.clear()
            await self._wake.wait()
        if self.fault is not None:
            raise self.fault
        return await right(self)

    patch.setattr(RoutedCall, "next_message", wrong)


@mutant("R406")
def a_failure_of_prefill_always_counts(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, error, now):  # type: ignore[no-untyped-def]
        return [] if self.ended else self._fail(self._of_prefill(error))

    patch.setattr(RoutedRequest, "on_prefill_failed", wrong)


@mutant("R407")
def any_end_is_a_good_one(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, leg, now):  # type: ignore[no-untyped-def]
        return [] if self.ended else self._finish()

    patch.setattr(RoutedRequest, "on_decode_ended", wrong)


@mutant("R408")
def any_lack_is_one_of_blocks(patch: pytest.MonkeyPatch) -> None:
    right = transport_fault

    def wrong(error, *rest):  # type: ignore[no-untyped-def]
        if error.code is Code.RESOURCE_EXHAUSTED:
            return Fault(Reason.NO_BLOCKS, error.message)
        return right(error, *rest)

    patch.setattr(machine, "transport_fault", wrong)


@mutant("R409")
def unknown_reasons_are_errors_of_the_engine(patch: pytest.MonkeyPatch) -> None:
    def wrong(error, *rest):  # type: ignore[no-untyped-def]
        return Fault(Reason.ENGINE_ERROR, error.message)

    patch.setattr(machine, "transport_fault", wrong)


@mutant("R410")
def prefill_fails_a_finished_answer(patch: pytest.MonkeyPatch) -> None:
    right = RoutedRequest.on_prefill_failed

    def wrong(self, error, now):  # type: ignore[no-untyped-def]
        if self._answer_complete and self.prefill is PrefillLeg.OPEN and not self.ended:
            return self._fail(self._of_prefill(error))
        return right(self, error, now)

    patch.setattr(RoutedRequest, "on_prefill_failed", wrong)
