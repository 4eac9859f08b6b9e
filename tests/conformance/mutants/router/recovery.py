"""R43x: requests that are tried elsewhere as if they were others."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.refs import TransferKey
from pd_grpc.router.legs import AttemptLegs
from pd_grpc.router.machine import CancelPrefill, RoutedRequest
from pd_grpc.router.recovery import FIRST_ATTEMPT
from pd_grpc.router.runtime import RoutedCall
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R431")
def every_attempt_is_the_first(patch: pytest.MonkeyPatch) -> None:
    wrong = property(lambda self: TransferKey(self._transfer_id, FIRST_ATTEMPT))
    patch.setattr(RoutedCall, "key", wrong)


@mutant("R431")
def every_attempt_is_another_transfer(patch: pytest.MonkeyPatch) -> None:
    right = RoutedCall._begin

    def wrong(self, begin):  # type: ignore[no-untyped-def]
        self._routing.in_flight.remove(self)
        self._transfer_id += "-again"
        self._routing.in_flight.add(self)
        right(self, begin)

    patch.setattr(RoutedCall, "_begin", wrong)


def _generated_with(patch: pytest.MonkeyPatch, change) -> None:  # type: ignore[no-untyped-def]
    """`change` what an attempt is told of the output that the client has."""
    right = AttemptLegs.__init__

    def wrong(self, call, routing, request, generated, *rest):  # type: ignore[no-untyped-def]
        right(self, call, routing, request, change(request, generated), *rest)

    patch.setattr(AttemptLegs, "__init__", wrong)


@mutant("R432")
def an_answer_begins_anew(patch: pytest.MonkeyPatch) -> None:
    _generated_with(patch, lambda request, generated: request.generated)


@mutant("R432")
def the_last_token_is_not_told(patch: pytest.MonkeyPatch) -> None:
    _generated_with(patch, lambda request, generated: generated[:-1])


@mutant("R433")
def the_old_prefill_computes_on(patch: pytest.MonkeyPatch) -> None:
    end = RoutedRequest._end

    def without_prefill(self):  # type: ignore[no-untyped-def]
        return [action for action in end(self) if not isinstance(action, CancelPrefill)]

    patch.setattr(RoutedRequest, "_end", without_prefill)
