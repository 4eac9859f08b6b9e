"""The bounds of what a request may ask of the sampler, each refusal naming its field."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.protocol.sampling import (
    MAX_BIASED_TOKENS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    Sampling,
    sampling_errors,
    vocabulary_errors,
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
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1.7e308},
        {"logit_bias": ((0, -100.0), (1, 100.0))},
        {"logit_bias": tuple((i, 1.0) for i in range(MAX_BIASED_TOKENS))},
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
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        *(
            (f"{kind}_penalty", value)
            for kind in ("presence", "frequency")
            for value in (-2.1, 2.1, math.nan, math.inf, -math.inf)
        ),
        *(("repetition_penalty", value) for value in (0.0, -1.0, math.nan, math.inf, -math.inf)),
        *(("logit_bias", ((5, value),)) for value in (-100.1, 100.1, math.nan, math.inf)),
        ("logit_bias", tuple((i, 1.0) for i in range(MAX_BIASED_TOKENS + 1))),
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


def test_a_bias_for_a_token_beyond_the_vocabulary_is_refused_with_the_token() -> None:
    biased = replace(PLAIN, logit_bias=((99, 1.0), (100, 1.0), (200, 1.0)))
    (wrong,) = vocabulary_errors(biased, 100)
    assert wrong.field == "sampling.logit_bias"
    assert "100 is outside" in wrong.description and "below 100" in wrong.description
    assert vocabulary_errors(biased, 201) == vocabulary_errors(PLAIN, 1) == []


def test_temperature_zero_is_greedy() -> None:
    assert replace(PLAIN, temperature=0.0).greedy
    assert not PLAIN.greedy
