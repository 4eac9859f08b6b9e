"""P8xx and P9xx: later versions, limits and drains gone wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from pd_grpc.prefill import machine, sessions, validation, welcomes
from pd_grpc.prefill.carriers import Carriers
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.sessions import DecodeSession
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import unbuilt_scope
from pd_grpc.v1 import layout_pb2, sampling_pb2
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS as mutant
from tests.conformance.mutants.prefill.wire import before_call


@mutant("P801")
def unknown_fields_are_refused(patch: pytest.MonkeyPatch) -> None:
    right = PrefillMachine._admit

    def wrong(self, request, now):  # type: ignore[no-untyped-def]
        if len(UnknownFieldSet(request)):
            raise Fault(Reason.BAD_REQUEST, "fields that are not known")
        right(self, request, now)

    patch.setattr(PrefillMachine, "_admit", wrong)


@mutant("P802")
def unknown_fields_of_a_welcome_are_refused(patch: pytest.MonkeyPatch) -> None:
    right = welcomes.objection

    def wrong(welcome, *ours):  # type: ignore[no-untyped-def]
        if len(UnknownFieldSet(welcome)):
            return Fault(Reason.LAYOUT_MISMATCH, "fields that are not known")
        return right(welcome, *ours)

    patch.setattr(sessions, "objection", wrong)


@mutant("P803")
def only_known_directions_are_looked_at(patch: pytest.MonkeyPatch) -> None:
    right = unbuilt_scope
    known = sampling_pb2.Direction.values()
    patch.setattr(
        validation,
        "unbuilt_scope",
        lambda scope: right(scope) if scope.direction in known else None,
    )


@mutant("P804")
def any_transport_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(welcomes, "INLINE", frozenset(range(100)))


@mutant("P808")
def a_transport_must_be_named(patch: pytest.MonkeyPatch) -> None:
    for module in (sessions, welcomes):
        patch.setattr(module, "INLINE", frozenset({layout_pb2.TRANSPORT_INLINE}))


@mutant("P808")
def a_grant_must_name_its_transport(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Carriers, "has", lambda self, transport: transport in self.offered)


@mutant("P805", max_message_bytes=1 << 20)
def small_messages_alone(patch: pytest.MonkeyPatch) -> None:
    """The setting is the fault."""


@mutant("P806")
def one_block_less(patch: pytest.MonkeyPatch) -> None:
    right = validation.check_prefill

    def wrong(request, tokens, name, limits):  # type: ignore[no-untyped-def]
        less = replace(limits, num_blocks=limits.num_blocks - 1)
        return right(request, tokens, name, less)

    patch.setattr(machine, "check_prefill", wrong)


@mutant("P807")
def one_token_less(patch: pytest.MonkeyPatch) -> None:
    right = DecodeSession._welcomed

    def wrong(self, welcome, now):  # type: ignore[no-untyped-def]
        welcome.max_model_len -= 1 if welcome.max_model_len else 0
        return right(self, welcome, now)

    patch.setattr(DecodeSession, "_welcomed", wrong)


@mutant("P807")
def an_answer_is_cut_to_what_d_takes(patch: pytest.MonkeyPatch) -> None:
    right = DecodeSession._welcomed
    limits = {}

    def wrong(self, welcome, now):  # type: ignore[no-untyped-def]
        limits[welcome.session_id] = welcome.max_model_len
        welcome.max_model_len = 0
        return right(self, welcome, now)

    def cut(request):  # type: ignore[no-untyped-def]
        room = limits[request.session_id] - request.prompt_tokens
        request.max_new_tokens = min(request.max_new_tokens, room)

    patch.setattr(DecodeSession, "_welcomed", wrong)
    before_call(patch, "allocate", cut)


@mutant("P901")
def a_drain_without_patience(patch: pytest.MonkeyPatch) -> None:
    right = PrefillMachine._drain
    patch.setattr(PrefillMachine, "_drain", lambda self, deadline_s, now: right(self, 0.0, now))
