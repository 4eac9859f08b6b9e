"""What a client hands over, and what it is told where that is no request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.client import Options
from pd_grpc.protocol.field_values import RequestError
from pd_grpc.protocol.requests import build_request, checked_endpoint, checked_timeout
from pd_grpc.v1 import inference_pb2

HUGE = 10**5000
"""More digits than Python writes out."""


def build(
    text: Any = None, messages: Any = None, token_ids: Any = None, **options: Any
) -> inference_pb2.GenerateRequest:
    return build_request(text, messages, token_ids, options)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_tokens": "9"}, "max_tokens: must be a whole number, not str"),
        ({"max_tokens": 9.0}, "max_tokens: must be a whole number, not float"),
        ({"max_tokens": None}, "max_tokens: must be a whole number, not None"),
        ({"max_tokens": [9]}, "max_tokens: must be a whole number, not list"),
        ({"max_tokens": np.array([1, 2])}, "max_tokens: must be a whole number, not ndarray"),
        ({"max_tokens": 2**31}, "max_tokens: must be at most 2147483647, not 2147483648"),
        ({"logprobs": True}, "logprobs: must be a whole number, not bool"),
        ({"seed": HUGE}, "seed: must be at most 18446744073709551615, not 16610 bits"),
        ({"seed": -HUGE}, "seed: must be at least 0, not 16610 bits"),
        ({"n": "3"}, "n: must be a whole number, not str"),
        ({"temperature": "hot"}, "temperature: must be a number, not str"),
        ({"temperature": 1j}, "temperature: must be a number, not complex"),
        ({"top_p": HUGE}, "top_p: must be a number that 64 bits can hold"),
        ({"ignore_eos": "no"}, "ignore_eos: must be true or false, not str"),
        ({"ignore_eos": HUGE}, "ignore_eos: must be true or false, not int"),
        ({"stop": "x"}, "stop: must be a sequence of text, not str"),
        ({"stop": 5}, "stop: must be a sequence of text, not int"),
        ({"stop": {"x"}}, "stop: must be a sequence of text, not set"),
        ({"stop": ["x", 5]}, "stop: must be text, not int (item 1)"),
        ({"stop": ["x", b"\xff"]}, "stop: must be text, not bytes (item 1)"),
        ({"stop": ["\udcff"]}, "stop: must be text that UTF-8 can carry (item 0)"),
        ({"stop_token_ids": 5}, "stop_token_ids: must be a sequence of whole numbers, not int"),
        ({"stop_token_ids": [5, "6"]}, "stop_token_ids: must be a whole number, not str (item 1)"),
        ({"stop_token_ids": [5, -6]}, "stop_token_ids: must be at least 0, not -6 (item 1)"),
        (
            {"stop_token_ids": np.array(5)},
            "stop_token_ids: must be a sequence of whole numbers, not ndarray",
        ),
        ({"generated_token_ids": [0.5]}, "generated_token_ids: must be a whole number, not float"),
        ({"logit_bias": [1]}, "logit_bias: must be a mapping from whole numbers to numbers, not"),
        ({"logit_bias": {"1": 2}}, "logit_bias: must be a whole number, not str (a key)"),
        ({"logit_bias": {-1: 2}}, "logit_bias: must be at least 0, not -1 (a key)"),
        ({"logit_bias": {1: "2"}}, "logit_bias: must be a number, not str (of key 1)"),
        ({"logit_bias": {HUGE: None}}, "logit_bias: must be at most 4294967295, not 16610 bits (a"),
        (
            {"logit_bias": {1: HUGE}},
            "logit_bias: must be a number that 64 bits can hold (of key 1)",
        ),
        ({"json_schema": {"maximum": HUGE}}, "json_schema: must be what JSON can say: "),
        ({"json_schema": 5}, "json_schema: must be text or a mapping, not int"),
        ({"regex": b"x"}, "regex: must be text, not bytes"),
        ({"request_id": 5}, "request_id: must be text, not int"),
        ({"cache_salt": "x"}, "cache_salt: must be bytes, not str"),
        ({"max_token": 5}, "max_token: is no option of a request"),
        ({"structured_output": {"regex": "x"}}, "structured_output: is no option of a request"),
    ],
)
def test_an_option_that_is_nothing_like_it_is_told_what_it_should_be(
    arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=r"^" + re.escape(says)):
        build("hi", **arguments)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"text": 5}, "text: must be text, not int"),
        ({"token_ids": "abc"}, "token_ids: must be a sequence of whole numbers, not str"),
        ({"token_ids": b"abc"}, "token_ids: must be a sequence of whole numbers, not bytes"),
        ({"token_ids": {1: 2}}, "token_ids: must be a sequence of whole numbers, not dict"),
        ({"token_ids": [1, None]}, "token_ids: must be a whole number, not None (item 1)"),
        ({"token_ids": [1, 2**32]}, "token_ids: must be at most 4294967295, not 4294967296 (item"),
        ({"messages": "hi"}, "messages: must be a sequence of (role, content) pairs, not str"),
        ({"messages": 5}, "messages: must be a sequence of (role, content) pairs, not int"),
        ({"messages": ["hi"]}, "messages: must be (role, content) pairs, not str (item 0)"),
        (
            {"messages": [("user", "hi"), {"role": "user", "content": "hi"}]},
            "messages: must be (role, content) pairs, not dict (item 1)",
        ),
        ({"messages": [("user",)]}, "messages: must be (role, content) pairs, not 1 values (item"),
        ({"messages": [("user", 5)]}, "messages: must be text, not int (content of item 0)"),
        ({"messages": [(None, "hi")]}, "messages: must be text, not None (role of item 0)"),
    ],
)
def test_a_prompt_that_is_none_is_told_what_it_should_be(prompt: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=r"^" + re.escape(says)):
        build(**prompt)


def test_a_schema_that_nests_beyond_json_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match=r"^json_schema: must be what JSON can say: "):
        build("hi", json_schema=deep)


@pytest.mark.parametrize("timeout_s", ["5", b"5", [5], {}, 1j, np.array([5.0, 6.0]), object()])
def test_a_time_that_is_no_number_is_told_so(timeout_s: Any) -> None:
    with pytest.raises(RequestError, match=r"^timeout_s: must be a number of seconds, not "):
        checked_timeout(timeout_s)


@pytest.mark.parametrize(
    "timeout_s", [Decimal("1e400"), Decimal("Infinity"), Fraction(0), np.float32(-1)]
)
def test_a_time_that_is_a_number_out_of_bounds_is_told_them(timeout_s: Any) -> None:
    with pytest.raises(RequestError, match=r"^timeout_s: must be above 0 and at most 1000000000 s"):
        checked_timeout(timeout_s)


@pytest.mark.parametrize("endpoint", [None, 5, b"h:1", ["h:1"]])
def test_an_endpoint_that_is_no_text_is_told_so(endpoint: Any) -> None:
    with pytest.raises(RequestError, match=r"^endpoint: must be host:port, not "):
        checked_endpoint(endpoint)


def test_numbers_of_other_libraries_and_whatever_is_iterated_over_are_taken() -> None:
    request = build(
        token_ids=np.arange(3),
        max_tokens=np.int64(9),
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        ignore_eos=np.True_,
        stop=(each for each in ("x", "y")),
        stop_token_ids=range(2),
        logit_bias={np.uint8(1): Decimal("0.5")},
        generated_token_ids=(4, 5),
    )
    assert [*request.token_ids.ids] == [0, 1, 2] and [*request.generated_token_ids] == [4, 5]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.5)
    assert sampling.ignore_eos and [*sampling.stop] == ["x", "y"]
    assert [*sampling.stop_token_ids] == [0, 1] and dict(sampling.logit_bias) == {1: 0.5}
    five: Any = Decimal(5)
    assert checked_timeout(five) == 5.0 and checked_timeout(None) is None


# --- whatever is handed over ----------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**32, -(2**31) - 1, 2**64]),
    st.floats(),
    st.complex_numbers(),
    st.fractions(),
    st.decimals(allow_nan=True),
    st.text(st.characters(), max_size=4),
    st.binary(max_size=4),
    st.sampled_from([np.int64(-5), np.float32(1.5), np.True_, np.array(5), np.array([1.0, 2.0])]),
    st.sampled_from([object(), int, len, ..., NotImplemented, bytearray(b"x"), memoryview(b"x")]),
)
HASHABLE = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(iter),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.sets(HASHABLE, max_size=3),
    ),
    max_leaves=6,
)
OPTIONS = st.dictionaries(st.sampled_from([*Options.__annotations__, "no_option"]), VALUES)
OURS = re.compile(
    r"is no option of a request|cannot be given beside json_schema|give exactly one of .*"
    r"|must be what JSON can say: .*"
    r"|must be (at least|at most) -?\d+, not (-?\d+|\d+ bits)"
    r"|must be (text that UTF-8 can carry|a number that 64 bits can hold)"
    r"|must be (a whole number|a number|text|bytes|true or false|text or a mapping"
    r"|a sequence of .*|a mapping from .*|\(role, content\) pairs), not [\w ]+",
    re.DOTALL,
)


def assert_ours_alone(prompt: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Handed over, it is a request or told what it should be."""
    try:
        request = build(**prompt, **options)
    except RequestError as error:
        assert error.field in {*prompt, *options, "text"}
        assert OURS.fullmatch(error.message), error
        assert re.fullmatch(r"|item \d+|a key|of key \d+|(role|content) of item \d+", error.part)
    else:
        assert inference_pb2.GenerateRequest.FromString(request.SerializeToString()) == request


@given(
    prompt=st.dictionaries(st.sampled_from(["text", "messages", "token_ids"]), VALUES, max_size=2),
    options=OPTIONS,
)
def test_no_words_but_ours_are_heard(prompt: dict[str, Any], options: dict[str, Any]) -> None:
    assert_ours_alone(prompt or {"text": "hi"}, options)


@given(st.sampled_from([*Options.__annotations__]), VALUES)
def test_no_words_but_ours_are_heard_of_one_option(option: str, value: Any) -> None:
    assert_ours_alone({"text": "hi"}, {option: value})


@given(VALUES)
def test_no_time_raises_anything_else(timeout_s: Any) -> None:
    try:
        checked = checked_timeout(timeout_s)
    except RequestError as error:
        assert error.field == "timeout_s"
    else:
        assert checked is None or 0 < checked <= 1e9
