"""R13x to R15x: what should be refused is not, or without saying what is wrong."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.messages import token_errors, unbuilt_sampling, unbuilt_scope
from pd_grpc.protocol.sampling import sampling_errors
from pd_grpc.router import intake, service
from pd_grpc.router.discovery import Discovery
from pd_grpc.router.in_flight import InFlight
from pd_grpc.router.intake import Limits
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R131")
def a_missing_prompt_is_a_line_break(patch: pytest.MonkeyPatch) -> None:
    right = intake.check_shape

    def wrong(request):  # type: ignore[no-untyped-def]
        if request.WhichOneof("prompt") is None:
            request.text = "\n"
        return right(request)

    patch.setattr(service, "check_shape", wrong)


@mutant("R132")
def an_empty_prompt_is_a_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "_emptiness", lambda request, kind: [])


@mutant("R133")
def messages_may_say_nothing(patch: pytest.MonkeyPatch) -> None:
    right = intake._emptiness

    def wrong(request, kind):  # type: ignore[no-untyped-def]
        return [] if request.messages.messages else right(request, kind)

    patch.setattr(intake, "_emptiness", wrong)


@mutant("R134")
def one_bound_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    right = sampling_errors

    def wrong(sampling):  # type: ignore[no-untyped-def]
        return [error for error in right(sampling) if error.field != "sampling.logprobs"]

    patch.setattr(intake, "sampling_errors", wrong)


@mutant("R135")
def the_first_wrong_field_alone(patch: pytest.MonkeyPatch) -> None:
    right = bad_request
    patch.setattr(intake, "bad_request", lambda errors: right(errors[:1]))


@mutant("R136")
def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    right = Discovery.limits

    def wrong(self):  # type: ignore[no-untyped-def]
        limits = right(self)
        return Limits(limits.max_model_len + 1, limits.vocab_size, limits.features)

    patch.setattr(Discovery, "limits", wrong)


@mutant("R137")
def too_large_without_numbers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "_too_large", lambda *numbers: Fault(Reason.TOO_LARGE, "too large"))


@mutant("R138")
def stop_ids_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    right = token_errors

    def wrong(ids, vocab_size, field):  # type: ignore[no-untyped-def]
        return [] if "stop" in field else right(ids, vocab_size, field)

    patch.setattr(intake, "token_errors", wrong)


@mutant("R138")
def biases_are_for_any_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "vocabulary_errors", lambda sampling, vocab_size: [])


@mutant("R139")
def a_hand_off_is_ignored(patch: pytest.MonkeyPatch) -> None:
    right = intake.check_shape

    def wrong(request):  # type: ignore[no-untyped-def]
        request.ClearField("handoff")
        return right(request)

    patch.setattr(service, "check_shape", wrong)


@mutant("R140")
def as_much_output_as_max_tokens(patch: pytest.MonkeyPatch) -> None:
    right = intake.fit

    def wrong(request, *rest):  # type: ignore[no-untyped-def]
        if len(request.generated_token_ids) == request.sampling.max_tokens:
            request.sampling.max_tokens += 1
        return right(request, *rest)

    patch.setattr(service, "fit", wrong)


@mutant("R141")
def names_of_any_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "name_errors", lambda name, field: [])


@mutant("R142")
def the_prompt_has_no_logprobs(patch: pytest.MonkeyPatch) -> None:
    right = unbuilt_sampling
    patch.setattr(intake, "unbuilt_sampling", lambda p: None if p.prompt_logprobs else right(p))


@mutant("R143")
def priorities_are_ignored(patch: pytest.MonkeyPatch) -> None:
    right = unbuilt_scope
    patch.setattr(intake, "unbuilt_scope", lambda p: None if p.priority else right(p))


@mutant("R144")
def later_directions_are_ignored(patch: pytest.MonkeyPatch) -> None:
    right = unbuilt_scope
    patch.setattr(intake, "unbuilt_scope", lambda p: None if p.direction > 2 else right(p))


@mutant("R150")
def names_may_be_in_flight_twice(patch: pytest.MonkeyPatch) -> None:
    right = InFlight.named

    @contextmanager
    def wrong(self, request_id):  # type: ignore[no-untyped-def]
        with right(self, f"{request_id}.{len(self)}"):
            yield

    patch.setattr(InFlight, "named", wrong)
