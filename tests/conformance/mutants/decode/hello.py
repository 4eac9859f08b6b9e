"""D12x: malformed hellos let in, and good ones refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pd_grpc.decode import sessions
from pd_grpc.decode.sessions import Sessions
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.messages import layout_to_proto
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import layout_pb2, types_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D120")
def any_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "name_errors", lambda name, field, required: [])


@mutant("D120")
def any_name_that_is_one(patch: pytest.MonkeyPatch) -> None:
    def errors(name, field, required):  # type: ignore[no-untyped-def]
        return [] if name else [FieldError(field, "is missing")]

    patch.setattr(sessions, "name_errors", errors)


@mutant("D121")
def a_name_is_measured_in_bytes(patch: pytest.MonkeyPatch) -> None:
    def errors(name, field, required):  # type: ignore[no-untyped-def]
        short = 0 < len(name.encode()) <= 128
        return [] if short else [FieldError(field, "has 1 to 128 bytes")]

    patch.setattr(sessions, "name_errors", errors)


@mutant("D122")
def epoch_zero_is_young(patch: pytest.MonkeyPatch) -> None:
    _patched(patch, lambda hello: setattr(hello.instance, "epoch", hello.instance.epoch or 1))


@mutant("D123")
def any_role(patch: pytest.MonkeyPatch) -> None:
    _patched(patch, lambda hello: setattr(hello.instance, "role", types_pb2.ROLE_PREFILL))


@mutant("D124")
def no_layout_is_ours(patch: pytest.MonkeyPatch) -> None:
    right = Sessions._check

    def check(self, hello):  # type: ignore[no-untyped-def]
        if not hello.layouts:
            hello.layouts.append(layout_to_proto(self._offer.layout))
        right(self, hello)

    patch.setattr(Sessions, "_check", check)


@mutant("D125")
def the_first_wrong_field_is_enough(patch: pytest.MonkeyPatch) -> None:
    right = bad_request
    patch.setattr(sessions, "bad_request", lambda wrong: right(wrong[:1]))


@mutant("D125")
def fields_are_named_without_their_path(patch: pytest.MonkeyPatch) -> None:
    right = bad_request

    def short_names(wrong):  # type: ignore[no-untyped-def]
        short = [FieldError(w.field.rsplit(".", 1)[-1], w.description) for w in wrong]
        return right(short)

    patch.setattr(sessions, "bad_request", short_names)


@mutant("D126")
def any_transport(patch: pytest.MonkeyPatch) -> None:
    _patched(patch, lambda hello: hello.ClearField("transports"))


@mutant("D127")
def an_unknown_transport_is_too_much(patch: pytest.MonkeyPatch) -> None:
    right = Sessions._check

    def check(self, hello):  # type: ignore[no-untyped-def]
        if any(t not in layout_pb2.Transport.values() for t in hello.transports):
            raise Fault(Reason.BAD_REQUEST, "a transport that is none")
        right(self, hello)

    patch.setattr(Sessions, "_check", check)


@mutant("D128")
def a_transport_must_be_spelt_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "plain_transport", lambda transport: transport)


def _patched(patch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    """Change every hello before it is checked."""
    right = Sessions._check

    def check(self, hello):  # type: ignore[no-untyped-def]
        change(hello)
        right(self, hello)

    patch.setattr(Sessions, "_check", check)
