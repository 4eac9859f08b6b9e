"""R42x: losses that are mistaken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.router.discovery import Discovery
from pd_grpc.router.machine import Leg, PrefillLeg, RoutedRequest
from pd_grpc.router.server import RouterServer
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R421")
def prefill_lost_is_decode_lost(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, error):  # type: ignore[no-untyped-def]
        return self._of_leg(error, Leg.PREFILL, "p", Reason.DECODE_LOST)

    patch.setattr(RoutedRequest, "_of_prefill", wrong)


@mutant("R422")
def decode_lost_is_prefill_lost(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, error):  # type: ignore[no-untyped-def]
        return self._of_leg(error, Leg.DECODE, "d", Reason.PREFILL_LOST)

    patch.setattr(RoutedRequest, "_of_decode", wrong)


@mutant("R423")
def decode_lost_is_the_end_of_the_answer(patch: pytest.MonkeyPatch) -> None:
    right = RoutedRequest.on_decode_failed

    def wrong(self, leg, error, now):  # type: ignore[no-untyped-def]
        return self._finish() if self.tokens else right(self, leg, error, now)

    patch.setattr(RoutedRequest, "on_decode_failed", wrong)


@mutant("R424")
def a_lost_prefill_takes_its_requests_along(patch: pytest.MonkeyPatch) -> None:
    right = RouterServer._update_readiness

    def wrong(self):  # type: ignore[no-untyped-def]
        right(self)
        if self.discovery.missing_role() == "prefill":
            for request in self.in_flight.running():
                request.fail(Fault(Reason.PREFILL_LOST, "P is gone"))

    patch.setattr(RouterServer, "_update_readiness", wrong)


@mutant("R425")
def decode_is_not_believed(patch: pytest.MonkeyPatch) -> None:
    right = RoutedRequest.on_prefill_failed

    def wrong(self, error, now):  # type: ignore[no-untyped-def]
        if self.prefill is PrefillLeg.OPEN and not self.ended:
            return self._fail(self._of_prefill(error))
        return right(self, error, now)

    patch.setattr(RoutedRequest, "on_prefill_failed", wrong)


@mutant("R426")
def the_first_epoch_is_kept(patch: pytest.MonkeyPatch) -> None:
    right = Discovery._identify

    async def wrong(self, view):  # type: ignore[no-untyped-def]
        before = view.epoch
        await right(self, view)
        view.epoch = before or view.epoch

    patch.setattr(Discovery, "_identify", wrong)


@mutant("R427")
def what_a_leg_said_is_lost(patch: pytest.MonkeyPatch) -> None:
    right = RoutedRequest._of_leg

    def wrong(self, error, *arguments):  # type: ignore[no-untyped-def]
        if isinstance(error, Fault):
            error = replace(error, metadata={})
        return right(self, error, *arguments)

    patch.setattr(RoutedRequest, "_of_leg", wrong)


@mutant("R427")
def nobody_asks_who_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Discovery, "suspect", lambda self, endpoint: None)
