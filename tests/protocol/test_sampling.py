"""The bounds of what a request may ask of the sampler, each refusal naming its field."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.protocol.sampling import (
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    Sampling,
    sampling_errors,
)

PLAIN = Sampling(max_tokens=16)


def wrong_fields(**changes: Any) -> list[str]:
    return [wrong.field for wrong in sampling_errors(replace(PLAIN, **changes))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_tokens": 1},
        {"min_tokens": 16},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 1e-9},
        {"top_k": 0},
        {"seed": 2**64 - 1},
        {"stop": ("x" * MAX_STOP_STRING_CHARS,) * MAX_STOP_STRINGS},
        {"stop_token_ids": (0,) * MAX_STOP_TOKEN_IDS},
        {"logprobs": 0},
        {"logprobs": MAX_TOP_LOGPROBS},
    ],
)
def test_what_lies_within_the_bounds_passes(changes: dict[str, Any]) -> None:
    assert wrong_fields(**changes) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -math.inf),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0000001),
        ("top_p", math.nan),
        ("top_p", math.inf),
        ("top_p", -math.inf),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        ("stop", ("",)),
        ("stop", ("x" * (MAX_STOP_STRING_CHARS + 1),)),
        ("stop_token_ids", (0,) * (MAX_STOP_TOKEN_IDS + 1)),
        ("logprobs", -1),
        ("logprobs", MAX_TOP_LOGPROBS + 1),
    ],
)
def test_what_lies_outside_is_refused_by_name(field: str, value: Any) -> None:
    expected = [f"sampling.{field}"]
    assert wrong_fields(**{field: value}) == expected


def test_min_tokens_is_measured_only_against_a_max_tokens_that_is_one() -> None:
    assert wrong_fields(max_tokens=-1, min_tokens=3) == ["sampling.max_tokens"]
    both = ["sampling.max_tokens", "sampling.min_tokens"]
    assert wrong_fields(max_tokens=-1, min_tokens=-1) == both


def test_every_wrong_field_is_named_with_its_limit() -> None:
    wrong = Sampling(max_tokens=16, temperature=math.nan, top_p=2.0, logprobs=99)
    found = {error.field: error.description for error in sampling_errors(wrong, "request")}
    assert list(found) == ["request.temperature", "request.top_p", "request.logprobs"]
    assert "between 0 and 100" in found["request.temperature"]
    assert "at most 1" in found["request.top_p"]
    assert "between 0 and 20" in found["request.logprobs"]


def test_temperature_zero_is_greedy() -> None:
    assert replace(PLAIN, temperature=0.0).greedy
    assert not PLAIN.greedy
