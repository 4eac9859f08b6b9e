"""R2xx: legs that are not a pair."""

from __future__ import annotations

import itertools
import secrets

import pytest

from pd_grpc.router import runtime
from pd_grpc.router.discovery import InstanceView
from pd_grpc.router.legs import AttemptLegs
from pd_grpc.router.machine import CancelDecode, OpenDecode, RoutedRequest
from pd_grpc.router.policies import Target
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R201")
def decode_is_called_after_prefill(patch: pytest.MonkeyPatch) -> None:
    start, handed_off = RoutedRequest.start, RoutedRequest.on_handed_off

    def late(self, now):  # type: ignore[no-untyped-def]
        actions = start(self, now)
        self.late = [action for action in actions if isinstance(action, OpenDecode)]
        self._decode_open = False
        return [action for action in actions if action not in self.late]

    def now_then(self, now):  # type: ignore[no-untyped-def]
        self._decode_open = True
        return [*self.late, *handed_off(self, now)]

    patch.setattr(RoutedRequest, "start", late)
    patch.setattr(RoutedRequest, "on_handed_off", now_then)


@mutant("R202")
def transfer_ids_with_a_slash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runtime, "mint_id", lambda prefix: f"{prefix}/{secrets.token_hex(16)}")


@mutant("R202")
def attempts_from_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runtime, "FIRST_ATTEMPT", 0)


@mutant("R203")
def transfer_ids_that_count(patch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    patch.setattr(runtime, "mint_id", lambda prefix: f"{prefix}-{next(numbers):032d}")


@mutant("R204")
def instances_named_after_their_endpoint(patch: pytest.MonkeyPatch) -> None:
    wrong = property(lambda self: Target(self.endpoint, self.endpoint))
    patch.setattr(InstanceView, "target", wrong)


def _open_prefill_with(patch: pytest.MonkeyPatch, change) -> None:  # type: ignore[no-untyped-def]
    """`change` the Ds that P is told of."""
    right = AttemptLegs._open_prefill

    def wrong(self, target, decodes):  # type: ignore[no-untyped-def]
        right(self, target, change(target, decodes))

    patch.setattr(AttemptLegs, "_open_prefill", wrong)


@mutant("R205")
def decode_under_the_name_of_prefill(patch: pytest.MonkeyPatch) -> None:
    def change(target, decodes):  # type: ignore[no-untyped-def]
        return tuple(Target(target.name, decode.endpoint) for decode in decodes)

    _open_prefill_with(patch, change)


@mutant("R206")
def the_last_choice_first(patch: pytest.MonkeyPatch) -> None:
    _open_prefill_with(patch, lambda target, decodes: decodes[::-1])


@mutant("R207")
def placing_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoutedRequest, "on_placing", lambda self, target, now: [])


@mutant("R207")
def the_leg_that_moved_stays_open_too(patch: pytest.MonkeyPatch) -> None:
    right = RoutedRequest.on_placing

    def wrong(self, target, now):  # type: ignore[no-untyped-def]
        return [a for a in right(self, target, now) if not isinstance(a, CancelDecode)]

    patch.setattr(RoutedRequest, "on_placing", wrong)


@mutant("R208", retry=False)
def every_refusal_of_decodes_is_the_end(patch: pytest.MonkeyPatch) -> None:
    right = RoutedRequest.on_decode_failed

    def wrong(self, leg, error, now):  # type: ignore[no-untyped-def]
        self._alternates.clear()
        return right(self, leg, error, now)

    patch.setattr(RoutedRequest, "on_decode_failed", wrong)
