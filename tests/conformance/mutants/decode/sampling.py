"""D22x: bounds of sampling that D does not see."""

from __future__ import annotations

import pytest

from pd_grpc.decode import checks
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.protocol.sampling import sampling_errors
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def _blind_to(patch: pytest.MonkeyPatch, field: str) -> None:
    """Bounds are checked without this field's."""
    right = sampling_errors

    def errors(sampling):  # type: ignore[no-untyped-def]
        return [e for e in right(sampling) if e.field != f"sampling.{field}"]

    patch.setattr(checks, "sampling_errors", errors)


@mutant("D220")
def any_max_tokens(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "max_tokens")


@mutant("D221")
def any_min_tokens(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "min_tokens")


@mutant("D222")
def any_temperature(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "temperature")


@mutant("D223")
def any_top_p(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "top_p")


@mutant("D224")
def any_top_k(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "top_k")


@mutant("D225")
def any_stop_strings(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "stop")


@mutant("D225")
def stop_strings_are_measured_in_bytes(patch: pytest.MonkeyPatch) -> None:
    right = sampling_from_proto

    def from_proto(params):  # type: ignore[no-untyped-def]
        found = right(params)
        as_bytes = tuple(text.encode().decode("latin-1") for text in found.stop)
        return type(found)(**{**vars(found), "stop": as_bytes})

    patch.setattr(checks, "sampling_from_proto", from_proto)


@mutant("D226")
def any_stop_token_ids(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "stop_token_ids")
