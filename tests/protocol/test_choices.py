"""How many choices there may be, and their seeds."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.protocol.choices import (
    MAX_CHOICES,
    choice_seed,
    choices_errors,
    choices_of,
    of_one,
)
from pd_grpc.v1 import sampling_pb2

seeds = st.integers(0, 2**64 - 1)


@given(seeds)
def test_the_first_choice_has_the_seed_of_the_request(seed: int) -> None:
    assert choice_seed(seed, 0) == seed


@given(seeds)
def test_no_two_choices_have_one_seed(seed: int) -> None:
    of_each = [choice_seed(seed, choice) for choice in range(MAX_CHOICES)]
    assert len({*of_each}) == MAX_CHOICES
    assert all(0 <= each < 2**64 for each in of_each)


def test_neighbouring_seeds_share_no_choice() -> None:
    of_each = [choice_seed(seed, choice) for seed in range(50) for choice in range(50)]
    assert len({*of_each}) == len(of_each)


def test_a_seed_is_what_the_reference_says_it_is() -> None:
    digest = hashlib.sha256((7).to_bytes(8, "little") + (2).to_bytes(4, "little")).digest()
    assert choice_seed(7, 2) == int.from_bytes(digest[:8], "little") == 0x9AA51E0AF2DE9B93


@pytest.mark.parametrize(("n", "choices"), [(0, 1), (1, 1), (2, 2), (128, 128)])
def test_none_is_one(n: int, choices: int) -> None:
    params = sampling_pb2.SamplingParams(n=n)
    assert choices_of(params) == choices
    assert choices_errors(params) == []


def test_one_too_many_is_named_with_the_limit() -> None:
    (wrong,) = choices_errors(sampling_pb2.SamplingParams(n=129))
    assert (wrong.field, wrong.description) == ("sampling.n", "must be at most 128")


def test_what_p_and_d_are_told_asks_for_one() -> None:
    params = sampling_pb2.SamplingParams(n=3, seed=7, stop=["x"])
    assert of_one(params) == sampling_pb2.SamplingParams(seed=7, stop=["x"])
    assert params.n == 3
