"""Values of the fields that a request asks the sampler with, and of its scope: at their bounds and
beyond, and for those that are reserved or a feature in use and off."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from pd_grpc.v1 import sampling_pb2

MAX_TOKENS = 8
"""Of every sampling made here that says nothing else."""

FEATURES: dict[str, Any] = {
    "logprobs": 0,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 1.0},
    "structured_output": sampling_pb2.StructuredOutput(regex="a+"),
}
"""Each field of SamplingParams that needs the feature of its name, in use."""

RESERVED_SAMPLING: dict[str, Any] = {
    "prompt_logprobs": True,
}
"""Each reserved field of SamplingParams, in use."""

ROUTERS_SAMPLING: dict[str, Any] = {"n": 2}
"""Each field of SamplingParams that is the router's, in use: P and D refuse it like a reserved
one."""

RESERVED_SCOPE: dict[str, Any] = {
    "model": "another",
    "adapter": "lora",
    "media_hashes": [b"m" * 32],
    "tenant": "somebody",
    "priority": -1,
    "siblings": 2,
    "draft_token_ids": [5],
    "direction": sampling_pb2.DIRECTION_PULL,
}
"""Each reserved field of RequestScope, in use."""

SAMPLING_OFF: dict[str, Any] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "prompt_logprobs": False,
}
"""Fields of SamplingParams that are reserved or a feature, with the values that mean off."""

SCOPE_OFF = sampling_pb2.RequestScope(siblings=1, direction=sampling_pb2.DIRECTION_PUSH)
"""A scope whose fields are set to what means none."""


@dataclass(frozen=True)
class Bounds:
    """Values of one field that are just allowed, and such as are just not."""

    within: tuple[Any, ...]
    beyond: tuple[Any, ...]


_LONG_STOP = "ü" * 256

_grammar = sampling_pb2.StructuredOutput

BOUNDS: dict[str, Bounds] = {
    "max_tokens": Bounds(within=(1,), beyond=(-1,)),
    "min_tokens": Bounds(within=(0, MAX_TOKENS), beyond=(-1, MAX_TOKENS + 1)),
    "temperature": Bounds(within=(0.0, 100.0), beyond=(-0.01, 100.01, math.nan, math.inf)),
    "top_p": Bounds(within=(1e-9, 1.0), beyond=(0.0, -0.5, 1.01, math.nan)),
    "top_k": Bounds(within=(0, 2**31 - 1), beyond=(-1,)),
    "stop": Bounds(
        within=([_LONG_STOP] * 16,),
        beyond=([*[_LONG_STOP] * 16, "x"], ["x", ""], ["x" * 257]),
    ),
    "stop_token_ids": Bounds(within=([*range(64)],), beyond=([*range(65)],)),
    "logprobs": Bounds(within=(0, 20), beyond=(-1, 21)),
    "min_p": Bounds(within=(0.0, 1.0), beyond=(-0.01, 1.01, math.nan)),
    "presence_penalty": Bounds(within=(-2.0, 2.0), beyond=(-2.01, 2.01, math.nan, math.inf)),
    "frequency_penalty": Bounds(within=(-2.0, 2.0), beyond=(-2.01, 2.01, math.nan, -math.inf)),
    "repetition_penalty": Bounds(within=(1e-9, 1e9), beyond=(0.0, -1.0, math.nan, math.inf)),
    "logit_bias": Bounds(
        within=({0: -100.0, 1: 100.0}, dict.fromkeys(range(1024), 1.0)),
        beyond=({0: -100.1}, {0: 100.1}, {0: math.nan}, dict.fromkeys(range(1025), 1.0)),
    ),
    "structured_output": Bounds(
        within=(_grammar(regex="(ü|a){1,9}"), _grammar(regex="a" * 16384)),
        beyond=(
            _grammar(),
            _grammar(json_schema=""),
            _grammar(regex=""),
            _grammar(regex="ü" * 8193),
            _grammar(json_schema=" " * 65535 + "{}"),
        ),
    ),
}
"""Each field of SamplingParams that has bounds, beside a max_tokens of MAX_TOKENS."""


def sampling_with(**fields: Any) -> sampling_pb2.SamplingParams:
    """A greedy sampling of MAX_TOKENS tokens but for these fields."""
    return sampling_pb2.SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.0, **fields})


def beyond_bounds(features: Container[str]) -> list[tuple[str, sampling_pb2.SamplingParams]]:
    """Each value beyond its bounds, alone, with the name of its field. What needs a feature only
    for a subject that has it: another refuses it whatever the value."""
    return [
        (field, sampling_with(**{field: value}))
        for field, bounds in BOUNDS.items()
        for value in bounds.beyond
        if field not in FEATURES or field in features
    ]


def all_beyond_bounds() -> tuple[set[str], sampling_pb2.SamplingParams]:
    """One value of every field beyond its bounds at once, with the names of the fields; without
    those that are a feature."""
    wrong = {field: bounds.beyond[0] for field, bounds in BOUNDS.items() if field not in FEATURES}
    return {*wrong}, sampling_with(**wrong)


def lacking(features: Container[str]) -> list[tuple[str, sampling_pb2.SamplingParams]]:
    """A sampling with each field in use that needs a feature beyond these, alone, with the field's
    path."""
    return [
        (f"sampling.{field}", sampling_with(**{field: value}))
        for field, value in FEATURES.items()
        if field not in features
    ]


def reserved_sampling() -> list[tuple[str, sampling_pb2.SamplingParams]]:
    """A sampling with each reserved field in use, alone, with the field's path."""
    return _in_use(RESERVED_SAMPLING)


def not_of_instances() -> list[tuple[str, sampling_pb2.SamplingParams]]:
    """The same with each field in use that no P and no D takes."""
    return _in_use({**RESERVED_SAMPLING, **ROUTERS_SAMPLING})


def _in_use(values: Mapping[str, Any]) -> list[tuple[str, sampling_pb2.SamplingParams]]:
    return [
        (f"sampling.{field}", sampling_with(**{field: value})) for field, value in values.items()
    ]


def reserved_scopes() -> list[tuple[str, sampling_pb2.RequestScope]]:
    """A scope with each of its fields in use, alone, with the field's path."""
    return [
        (f"scope.{field}", sampling_pb2.RequestScope(**{field: value}))
        for field, value in RESERVED_SCOPE.items()
    ]
