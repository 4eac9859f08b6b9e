"""D70x: reserved fields that D does not see."""

from __future__ import annotations

import pytest

from pd_grpc.decode import checks, client_desk, prefill_desk
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import sampling_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def _blind_to(patch: pytest.MonkeyPatch, check: str, *fields: str) -> None:
    """Reserved fields are looked for without these."""
    right = getattr(checks, check)

    def unbuilt(message):  # type: ignore[no-untyped-def]
        seen = type(message)()
        seen.CopyFrom(message)
        for field in fields:
            seen.ClearField(field)
        return right(seen)

    patch.setattr(checks, check, unbuilt)


def _has(patch: pytest.MonkeyPatch, *features: str) -> None:
    """D believes that it and every P have these."""
    right = checks.check_features

    def check(sampling, scope, negotiated):  # type: ignore[no-untyped-def]
        right(sampling, scope, negotiated | {*features})

    patch.setattr(checks, "check_features", check)


@mutant("D700", "D702")
def tenants_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "unbuilt_scope", "tenant")


@mutant("D700", "D702")
def pulling_is_pushing(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "unbuilt_scope", "direction")


@mutant("D701", "D703")
def what_the_prompt_would_be_worth_is_not_told(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "unbuilt_sampling", "prompt_logprobs")


@mutant("D703", "D704")
def penalties_are_ignored(patch: pytest.MonkeyPatch) -> None:
    _has(patch, "presence_penalty", "frequency_penalty")


@mutant("D701")
def a_feature_is_a_malformed_field(patch: pytest.MonkeyPatch) -> None:
    right = checks.check_allocate

    def check(request, limits, negotiated):  # type: ignore[no-untyped-def]
        try:
            right(request, limits, negotiated)
        except Fault as fault:
            if fault.reason is Reason.FEATURE:
                raise bad_request([FieldError(fault.metadata["feature"], "is none")]) from None
            raise

    patch.setattr(prefill_desk, "check_allocate", check)


@mutant("D702", "D703")
def local_requests_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    right = checks.check_generate

    def check(request, limits):  # type: ignore[no-untyped-def]
        if not request.HasField("handoff"):
            request.ClearField("scope")
            for field in ("min_p", "n", "prompt_logprobs"):
                request.sampling.ClearField(field)
        return right(request, limits)

    patch.setattr(client_desk, "check_generate", check)


@mutant("D704")
def logprobs_are_left_out(patch: pytest.MonkeyPatch) -> None:
    _has(patch, "logprobs")


@mutant("D705")
def whatever_is_set_is_used(patch: pytest.MonkeyPatch) -> None:
    def lacking(params, features):  # type: ignore[no-untyped-def]
        optional = ("min_p", "repetition_penalty")
        return next((f"sampling.{name}" for name in optional if params.HasField(name)), None)

    patch.setattr(checks, "lacking_feature", lacking)


@mutant("D705")
def pushing_is_a_feature(patch: pytest.MonkeyPatch) -> None:
    def unbuilt(scope):  # type: ignore[no-untyped-def]
        push = scope.direction == sampling_pb2.DIRECTION_PUSH
        return "scope.direction" if push else None

    patch.setattr(checks, "unbuilt_scope", unbuilt)
