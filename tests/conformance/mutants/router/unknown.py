"""R80x: a router that cannot bear what it does not know."""

from __future__ import annotations

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.router import intake, service
from pd_grpc.router.legs import AttemptLegs
from pd_grpc.router.outbox import Outbox
from pd_grpc.v1 import types_pb2
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R801")
def unknown_fields_are_refused(patch: pytest.MonkeyPatch) -> None:
    right = intake.check_shape

    def wrong(request):  # type: ignore[no-untyped-def]
        if len(UnknownFieldSet(request)):
            raise bad_request([FieldError("request", "has unknown fields")])
        return right(request)

    patch.setattr(service, "check_shape", wrong)


@mutant("R802")
def unknown_fields_of_decode_are_a_defect(patch: pytest.MonkeyPatch) -> None:
    right = AttemptLegs._on_decode_message

    def wrong(self, leg, message, target):  # type: ignore[no-untyped-def]
        if len(UnknownFieldSet(message)):
            _fail(self, "a field of a later version")
        else:
            right(self, leg, message, target)

    patch.setattr(AttemptLegs, "_on_decode_message", wrong)


@mutant("R803")
def unknown_events_are_a_defect(patch: pytest.MonkeyPatch) -> None:
    right = AttemptLegs._on_prefill_message

    def wrong(self, message):  # type: ignore[no-untyped-def]
        if message.WhichOneof("event") is None:
            _fail(self, "an event of a later version")
        else:
            right(self, message)

    patch.setattr(AttemptLegs, "_on_prefill_message", wrong)


@mutant("R804")
def unknown_ends_are_none(patch: pytest.MonkeyPatch) -> None:
    right = AttemptLegs._on_decode_message

    def wrong(self, leg, message, target):  # type: ignore[no-untyped-def]
        if message.finish_reason not in types_pb2.FinishReason.values():
            message.ClearField("finish_reason")
        right(self, leg, message, target)

    patch.setattr(AttemptLegs, "_on_decode_message", wrong)


@mutant("R805")
def half_a_character_is_dropped(patch: pytest.MonkeyPatch) -> None:
    right = Outbox.push

    def wrong(self, message):  # type: ignore[no-untyped-def]
        if "\ufffd" not in self._detokenizer._tokenizer.decode(message.token_ids):
            right(self, message)

    patch.setattr(Outbox, "push", wrong)


def _fail(legs: AttemptLegs, why: str) -> None:
    legs._call.took(legs.machine.on_fault(Fault(Reason.ENGINE_ERROR, why), legs._now()))
