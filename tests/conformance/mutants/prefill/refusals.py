"""P7xx: requests taken in that should not be, or refused in the wrong words."""

from __future__ import annotations

from functools import partial

import pytest

from pd_grpc.prefill import machine, placement, validation
from pd_grpc.prefill.asking import objection
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.requests import Requests
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.protocol.refs import TransferKey, key_of, ref_errors
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import prefill_pb2
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS as mutant


@mutant("P701")
def an_empty_prompt_by_another_name(patch: pytest.MonkeyPatch) -> None:
    right = validation._token_errors

    def wrong(request, tokens, limits):  # type: ignore[no-untyped-def]
        if not request.token_ids:
            return [FieldError("prompt", "must have at least one token")]
        return right(request, tokens, limits)

    patch.setattr(validation, "_token_errors", wrong)


@mutant("P702")
def any_token_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(validation, "token_errors", lambda tokens, vocab_size, field: [])


@mutant("P703")
def max_tokens_has_a_default(patch: pytest.MonkeyPatch) -> None:
    right = sampling_from_proto
    patch.setattr(validation, "sampling_from_proto", partial(right, default_max_tokens=16))


@mutant("P704")
def any_transfer_id_will_do(patch: pytest.MonkeyPatch) -> None:
    right = ref_errors
    patch.setattr(
        validation,
        "ref_errors",
        lambda ref: [wrong for wrong in right(ref) if wrong.field != "ref.transfer_id"],
    )


@mutant("P705")
def attempts_count_from_nought(patch: pytest.MonkeyPatch) -> None:
    right = ref_errors
    patch.setattr(
        validation,
        "ref_errors",
        lambda ref: [wrong for wrong in right(ref) if wrong.field != "ref.attempt"],
    )


@mutant("P706")
def a_missing_decode_by_another_name(patch: pytest.MonkeyPatch) -> None:
    right = validation._decode_errors

    def wrong(request):  # type: ignore[no-untyped-def]
        if not request.decodes:
            return [FieldError("request", "must name at least one decode instance")]
        return right(request)

    patch.setattr(validation, "_decode_errors", wrong)


@mutant("P707")
def only_the_first_decode_is_looked_at(patch: pytest.MonkeyPatch) -> None:
    right = validation._decode_errors
    patch.setattr(
        validation,
        "_decode_errors",
        lambda request: right(prefill_pb2.PrefillRequest(decodes=request.decodes[:1])),
    )


@mutant("P707")
def any_port_will_do(patch: pytest.MonkeyPatch) -> None:
    def wrong(endpoint):  # type: ignore[no-untyped-def]
        if ":" not in endpoint:
            raise ValueError("has no port")

    patch.setattr(validation, "check_endpoint", wrong)


@mutant("P708")
def reserved_sampling_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(validation, "unbuilt_sampling", lambda sampling: None)


@mutant("P709")
def scope_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(validation, "unbuilt_scope", lambda scope: None)


@mutant("P710")
def whoever_is_meant(patch: pytest.MonkeyPatch) -> None:
    right = validation.check_prefill

    def wrong(request, tokens, name, limits):  # type: ignore[no-untyped-def]
        return right(request, tokens, request.prefill_name or name, limits)

    patch.setattr(machine, "check_prefill", wrong)


@mutant("P711")
def too_long_is_too_large(patch: pytest.MonkeyPatch) -> None:
    right = validation._token_errors

    def wrong(request, tokens, limits):  # type: ignore[no-untyped-def]
        if len(tokens) >= limits.max_model_len:
            raise Fault(Reason.TOO_LARGE, "longer than the model")
        return right(request, tokens, limits)

    patch.setattr(validation, "_token_errors", wrong)


@mutant("P712")
def no_token_need_be_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(validation, "_answer_errors", lambda request, sampling: [])


@mutant("P713")
def names_of_any_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(validation, "name_errors", lambda name, field: [])


@mutant("P714")
def one_violation_is_enough(patch: pytest.MonkeyPatch) -> None:
    right = bad_request
    patch.setattr(validation, "bad_request", lambda wrong: right(wrong[:1]))


@mutant("P715")
def features_are_not_negotiated(patch: pytest.MonkeyPatch) -> None:
    right = objection

    def wrong(record, session):  # type: ignore[no-untyped-def]
        found = right(record, session)
        return None if found is not None and found.reason is Reason.FEATURE else found

    patch.setattr(validation, "_check_features", lambda request, limits: None)
    patch.setattr(placement, "objection", wrong)


@mutant("P720")
def the_second_ends_the_first(patch: pytest.MonkeyPatch) -> None:
    right = PrefillMachine._admit

    def wrong(self, request, now):  # type: ignore[no-untyped-def]
        first = self.requests.in_flight.get(key_of(request.ref))
        if first is not None:
            fault = Fault(Reason.DUPLICATE_TRANSFER, "it came twice")
            self._fail(first, fault, now, True)
            raise fault
        right(self, request, now)

    patch.setattr(PrefillMachine, "_admit", wrong)


@mutant("P721")
def an_older_attempt_is_in_the_way(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, older, newer, now):  # type: ignore[no-untyped-def]
        raise Fault(Reason.DUPLICATE_TRANSFER, f"{older.key} is in flight here")

    patch.setattr(PrefillMachine, "_supersede", wrong)


@mutant("P722")
def the_attempt_that_comes_last_counts(patch: pytest.MonkeyPatch) -> None:
    right = PrefillMachine._admit

    def wrong(self, request, now):  # type: ignore[no-untyped-def]
        try:
            right(self, request, now)
        except Fault as fault:
            if fault.reason is not Reason.STALE_ATTEMPT:
                raise
            newest = TransferKey(request.ref.transfer_id, int(fault.metadata["newest"]))
            if (flying := self.requests.in_flight.get(newest)) is not None:
                self._supersede(flying, key_of(request.ref), now)

    patch.setattr(PrefillMachine, "_admit", wrong)


@mutant("P723")
def what_has_ended_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requests, "tombstone", lambda self, key, now: None)
