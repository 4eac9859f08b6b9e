"""Between messages and the types the rules work on: nothing is lost, nothing is let pass."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.conformance.sampling_values import FEATURES
from pd_grpc.protocol.layout import CANONICAL, GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.messages import (
    INLINE,
    MAX_DURATION_S,
    duration,
    lacking_feature,
    layout_from_proto,
    layout_to_proto,
    prompt_digest,
    sampling_from_proto,
    sampling_to_proto,
    scope_errors,
    seconds,
    token_errors,
    transport_name,
    unbuilt_sampling,
    unbuilt_scope,
)
from pd_grpc.protocol.sampling import GrammarKind, Sampling, StructuredOutput
from pd_grpc.v1 import decode_pb2, layout_pb2, sampling_pb2

samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 2**31 - 1),
    min_tokens=st.integers(0, 2**31 - 1),
    temperature=st.floats(allow_nan=False),
    top_p=st.floats(allow_nan=False),
    top_k=st.integers(-(2**31), 2**31 - 1),
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(-(2**31), 2**31 - 1),
    min_p=st.floats(allow_nan=False),
    presence_penalty=st.floats(allow_nan=False),
    frequency_penalty=st.floats(allow_nan=False),
    repetition_penalty=st.floats(allow_nan=False),
    logit_bias=st.dictionaries(
        st.integers(0, 2**32 - 1), st.floats(allow_nan=False), max_size=3
    ).map(lambda biases: tuple(sorted(biases.items()))),
    structured_output=st.none()
    | st.just(StructuredOutput(None, ""))
    | st.builds(StructuredOutput, kind=st.sampled_from(GrammarKind), text=st.text()),
)


@given(samplings)
def test_sampling_survives_the_wire_unchanged(sampling: Sampling) -> None:
    wire = sampling_to_proto(sampling).SerializeToString()
    assert sampling_from_proto(sampling_pb2.SamplingParams.FromString(wire)) == sampling


def test_what_a_client_leaves_out_gets_the_defaults() -> None:
    assert sampling_from_proto(sampling_pb2.SamplingParams(), 64) == Sampling(max_tokens=64)
    assert sampling_from_proto(sampling_pb2.SamplingParams()).max_tokens == 0
    asked = sampling_pb2.SamplingParams(max_tokens=3, temperature=0.0, top_p=0.0, seed=0)
    read = sampling_from_proto(asked, 64)
    assert (read.max_tokens, read.temperature, read.top_p, read.seed) == (3, 0.0, 0.0, 0)
    asked = sampling_pb2.SamplingParams(max_tokens=3, repetition_penalty=0.0)
    assert sampling_from_proto(asked).repetition_penalty == 0.0


def test_biases_are_the_same_in_whatever_order_they_come() -> None:
    there = sampling_pb2.SamplingParams(max_tokens=3, logit_bias={7: 1.0, 2: -1.0})
    back = sampling_pb2.SamplingParams(max_tokens=3, logit_bias={2: -1.0, 7: 1.0})
    assert sampling_from_proto(there) == sampling_from_proto(back)


@pytest.mark.parametrize(("field", "value"), FEATURES.items())
def test_a_sampling_field_that_needs_a_feature_is_named_where_it_lacks(
    field: str, value: Any
) -> None:
    params = sampling_pb2.SamplingParams(max_tokens=1, **{field: value})
    assert lacking_feature(params, ()) == f"sampling.{field}"
    assert lacking_feature(params, {*FEATURES} - {field}) == f"sampling.{field}"
    assert lacking_feature(params, [field]) is None
    assert unbuilt_sampling(params) is None


def test_values_that_are_no_numbers_need_the_feature_too() -> None:
    for field in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        params = sampling_pb2.SamplingParams(max_tokens=1)
        setattr(params, field, float("nan"))
        assert lacking_feature(params, ()) == f"sampling.{field}"


RESERVED_SAMPLING: dict[str, Any] = {
    "n": 2,
    "prompt_logprobs": True,
}
RESERVED_SCOPE: dict[str, Any] = {
    "model": "other",
    "adapter": "lora",
    "media_hashes": [b"h"],
    "tenant": "t",
    "priority": -1,
    "siblings": 2,
    "draft_token_ids": [1],
    "direction": sampling_pb2.DIRECTION_PULL,
}


@pytest.mark.parametrize(("field", "value"), RESERVED_SAMPLING.items())
def test_a_sampling_field_that_is_not_built_is_named(field: str, value: Any) -> None:
    params = sampling_pb2.SamplingParams(max_tokens=1, **{field: value})
    assert unbuilt_sampling(params) == f"sampling.{field}"


@pytest.mark.parametrize(("field", "value"), RESERVED_SCOPE.items())
def test_a_request_field_that_is_not_built_is_named(field: str, value: Any) -> None:
    assert unbuilt_scope(sampling_pb2.RequestScope(**{field: value})) == f"scope.{field}"


def test_a_direction_of_a_later_version_is_named() -> None:
    later: Any = max(sampling_pb2.Direction.values()) + 1
    assert unbuilt_scope(sampling_pb2.RequestScope(direction=later)) == "scope.direction"


def test_reserved_fields_at_rest_are_let_pass() -> None:
    at_rest = sampling_pb2.SamplingParams(min_p=0.0, repetition_penalty=1.0, n=1)
    assert unbuilt_sampling(at_rest) is None
    assert lacking_feature(at_rest, ()) is None
    push = sampling_pb2.RequestScope(siblings=1, direction=sampling_pb2.DIRECTION_PUSH)
    assert unbuilt_scope(push) is None


def test_no_field_of_the_protocol_is_silently_ignored() -> None:
    built = {field.name for field in fields(Sampling)}
    sampling = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    assert sampling == built | set(RESERVED_SAMPLING)
    scope = {field.name for field in sampling_pb2.RequestScope.DESCRIPTOR.fields}
    assert scope == set(RESERVED_SCOPE) | {"cache_salt"}


@pytest.mark.parametrize(("size", "wrong"), [(0, []), (64, []), (65, ["scope.cache_salt"])])
def test_a_salt_has_as_many_bytes_as_it_may(size: int, wrong: list[str]) -> None:
    scope = sampling_pb2.RequestScope(cache_salt=b"s" * size)
    assert unbuilt_scope(scope) is None
    assert [error.field for error in scope_errors(scope)] == wrong


layouts = st.builds(
    KvLayout,
    model=st.text(max_size=8),
    positions=st.text(max_size=8),
    block_size=st.integers(0, 2**32 - 1),
    format=st.sampled_from([CANONICAL, "vllm-cpu"]),
    groups=st.lists(
        st.builds(
            KvGroup,
            kind=st.sampled_from(GroupKind),
            layers=st.integers(0, 2**32 - 1),
            window=st.integers(0, 2**32 - 1),
            planes=st.lists(
                st.builds(
                    Plane,
                    kind=st.sampled_from(PlaneKind),
                    dtype=st.text(max_size=8),
                    heads=st.integers(0, 2**32 - 1),
                    head_dim=st.integers(0, 2**32 - 1),
                ),
                max_size=3,
            ).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
)


@given(layouts)
def test_a_layout_survives_the_wire_unchanged(layout: KvLayout) -> None:
    wire = layout_to_proto(layout).SerializeToString()
    assert layout_from_proto(layout_pb2.KvLayout.FromString(wire)) == layout


def test_f63_a_layout_that_leaves_defaults_out_equals_one_that_writes_them() -> None:
    plane = layout_pb2.Plane(kind=layout_pb2.PLANE_KIND_K, dtype="int8", heads=1, head_dim=1)
    terse = layout_pb2.KvLayout(
        model="m", block_size=16, groups=[layout_pb2.KvGroup(layers=1, planes=[plane])]
    )
    full = layout_pb2.KvLayout()
    full.CopyFrom(terse)
    full.format = "canonical"
    full.groups[0].kind = layout_pb2.KV_GROUP_KIND_FULL
    assert layout_from_proto(terse) == layout_from_proto(full)


@pytest.mark.parametrize(
    "group",
    [
        layout_pb2.KvGroup(kind=99),  # type: ignore[arg-type]
        layout_pb2.KvGroup(planes=[layout_pb2.Plane(kind=99)]),  # type: ignore[arg-type]
        layout_pb2.KvGroup(planes=[layout_pb2.Plane()]),
    ],
)
def test_a_kind_this_version_does_not_know_is_an_error_that_says_where(
    group: layout_pb2.KvGroup,
) -> None:
    known = layout_pb2.KvGroup(kind=layout_pb2.KV_GROUP_KIND_FULL)
    with pytest.raises(ValueError, match=r"groups\[1\]"):
        layout_from_proto(layout_pb2.KvLayout(groups=[known, group]))


@given(st.floats(0, 1e9))
def test_a_duration_keeps_a_time_to_the_nanosecond(time_s: float) -> None:
    sent = duration(time_s)
    assert 0 <= sent.nanos < 10**9
    assert abs(seconds(sent) - time_s) <= 1e-9 + time_s * 1e-15


def test_a_time_that_is_over_is_no_time() -> None:
    assert seconds(duration(-3.5)) == 0.0


@pytest.mark.parametrize(
    ("token_ids", "raw"),
    [
        ([], b""),
        ([1, 2], b"\x01\0\0\0\x02\0\0\0"),
        ([0x01020304, 2**32 - 1], b"\x04\x03\x02\x01\xff\xff\xff\xff"),
    ],
)
def test_a_prompts_digest_is_over_little_endian_uint32(token_ids: list[int], raw: bytes) -> None:
    assert prompt_digest(token_ids) == hashlib.sha256(raw).digest()


def test_the_first_token_outside_the_vocabulary_is_named_with_the_limit() -> None:
    assert token_errors([0, 99], 100, "token_ids") == []
    (wrong,) = token_errors([0, 100, 7, 200], 100, "token_ids")
    assert wrong.field == "token_ids[1]"
    assert token_errors([], 100, "token_ids") == []
    assert "100 is outside" in wrong.description and "below 100" in wrong.description


def test_a_duration_beyond_what_protobuf_allows_is_cut_to_that() -> None:
    longest = Duration(seconds=2**63 - 1, nanos=999_999_999)
    assert seconds(longest) == MAX_DURATION_S
    again = duration(seconds(longest))
    assert again.seconds == MAX_DURATION_S
    assert again.ToJsonString() == f"{MAX_DURATION_S}s"
    assert duration(float("inf")) == again


def test_a_transport_of_a_later_version_is_named_by_its_number() -> None:
    hello = decode_pb2.Hello()
    hello.transports.append(77)  # type: ignore[arg-type]
    assert [transport_name(t) for t in hello.transports] == ["77"]
    assert [transport_name(t) for t in sorted(INLINE)] == [
        "TRANSPORT_UNSPECIFIED",
        "TRANSPORT_INLINE",
    ]
