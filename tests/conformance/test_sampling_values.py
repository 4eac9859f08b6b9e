"""The values that all roles are tried with: no field of the protos is forgotten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.conformance.sampling_values import (
    BOUNDS,
    FEATURES,
    RESERVED_SAMPLING,
    RESERVED_SCOPE,
    ROUTERS_SAMPLING,
    SAMPLING_OFF,
    SCOPE_OFF,
    all_beyond_bounds,
    lacking,
    not_of_instances,
    reserved_scopes,
    sampling_with,
)
from pd_grpc.protocol.messages import (
    lacking_feature,
    sampling_from_proto,
    unbuilt_sampling,
    unbuilt_scope,
)
from pd_grpc.protocol.sampling import sampling_errors
from pd_grpc.v1 import sampling_pb2

PROTO = Path(__file__).parents[2] / "protos" / "pd_grpc" / "v1" / "sampling.proto"

WITHOUT_BOUNDS = {"seed", "ignore_eos"}


def reserved_fields(message: str, word: str = "Reserved") -> set[str]:
    """Fields of a message whose comment begins with "Reserved", or another word."""
    text = PROTO.read_text(encoding="utf-8")
    found = re.search(rf"^message {message} {{$(.*?)^}}$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    fields = re.findall(r"((?:^  //.*\n)+)^  [^/\n]*?(\w+) = \d+;", found[1], re.MULTILINE)
    return {name for comment, name in fields if comment.strip().startswith(f"// {word}")}


@pytest.mark.parametrize(
    ("message", "values"),
    [("SamplingParams", RESERVED_SAMPLING), ("RequestScope", RESERVED_SCOPE)],
)
def test_each_reserved_field_is_used(message: str, values: dict[str, Any]) -> None:
    assert reserved_fields(message) == {*values}


def test_each_field_that_needs_a_feature_is_used() -> None:
    assert reserved_fields("SamplingParams", "Feature") == {*FEATURES}
    assert [path for path, _ in lacking(())] == [f"sampling.{name}" for name in FEATURES]
    assert [path for path, _ in lacking({*FEATURES} - {"min_p"})] == ["sampling.min_p"]


@pytest.mark.parametrize(("path", "sampling"), lacking(()))
def test_a_field_that_needs_a_feature_is_in_use(
    path: str, sampling: sampling_pb2.SamplingParams
) -> None:
    assert lacking_feature(sampling, ()) == path


def test_each_other_field_of_sampling_has_bounds_or_needs_none() -> None:
    fields = {*sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name}
    others = fields - reserved_fields("SamplingParams") - {*ROUTERS_SAMPLING}
    assert {*BOUNDS} == others - WITHOUT_BOUNDS


@pytest.mark.parametrize(("path", "sampling"), not_of_instances())
def test_a_reserved_field_of_sampling_is_in_use(
    path: str, sampling: sampling_pb2.SamplingParams
) -> None:
    assert unbuilt_sampling(sampling) == path


@pytest.mark.parametrize(("path", "scope"), reserved_scopes())
def test_a_field_of_scope_is_in_use(path: str, scope: sampling_pb2.RequestScope) -> None:
    assert unbuilt_scope(scope) == path


def test_what_is_off_is_not_in_use() -> None:
    assert unbuilt_sampling(sampling_with(**SAMPLING_OFF)) is None
    assert lacking_feature(sampling_with(**SAMPLING_OFF), ()) is None
    assert unbuilt_scope(SCOPE_OFF) is None


@pytest.mark.parametrize("field", BOUNDS)
def test_values_lie_on_their_side_of_the_bounds(field: str) -> None:
    def wrong(value: Any) -> set[str]:
        sampling = sampling_from_proto(sampling_with(**{field: value}))
        return {error.field for error in sampling_errors(sampling)}

    path = f"sampling.{field}"
    assert [wrong(value) for value in BOUNDS[field].within] == [set()] * len(BOUNDS[field].within)
    assert [wrong(value) for value in BOUNDS[field].beyond] == [{path}] * len(BOUNDS[field].beyond)


def test_all_fields_beyond_their_bounds_are_wrong_at_once() -> None:
    names, sampling = all_beyond_bounds()
    wrong = {error.field for error in sampling_errors(sampling_from_proto(sampling))}
    assert wrong == {f"sampling.{name}" for name in names}
