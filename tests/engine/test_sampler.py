"""Choosing a token: the filters against plain references, the draws against their distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_grpc.engine.base import SampleSpec
from pd_grpc.engine.sampler import Logits, NotFinite, NotSampleable, candidates, sample, uniforms
from pd_grpc.protocol.sampling import Sampling

EOS = frozenset({0})


def logits_of(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def random_logits(seed: int, vocab: int = 2000) -> Logits:
    return (np.random.default_rng(seed).normal(size=vocab) * 3).astype(np.float32)


def spec(position: int = 10, generated: int = 0, **options: Any) -> SampleSpec:
    return SampleSpec(Sampling(max_tokens=100, **options), position, generated)


def reference_candidates(logits: Logits, sampling: Sampling) -> dict[int, float]:
    """The definition of the filters in plain Python: id to probability."""
    scaled = [float(x) / sampling.temperature for x in logits]
    top = max(scaled)
    weights = {i: math.exp(x - top) for i, x in enumerate(scaled)}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    if sampling.top_p < 1:
        total = sum(weights[i] for i in ranked)
        mass, kept = 0.0, 0
        while kept < len(ranked) and mass < sampling.top_p * total * (1 - 1e-12):
            mass += weights[ranked[kept]]
            kept += 1
        ranked = ranked[:kept]
    total = sum(weights[i] for i in ranked)
    return {i: weights[i] / total for i in ranked}


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-80, 80).map(lambda n: n / 8), min_size=1, max_size=60),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([0.001, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_the_filters_keep_what_their_definition_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    row = logits_of(*logits)

    token_ids, weights = candidates(row, sampling)

    expected = reference_candidates(row, sampling)
    assert token_ids.tolist() == sorted(expected)
    np.testing.assert_allclose(weights / weights.sum(), [expected[i] for i in sorted(expected)])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.95), (0, 0.9999), (50, 0.9), (700, 1.0)])
def test_the_filters_keep_the_same_of_a_large_vocabulary(top_k: int, top_p: float) -> None:
    sampling = Sampling(max_tokens=1, temperature=1.5, top_k=top_k, top_p=top_p)
    row = random_logits(1)

    token_ids, _ = candidates(row, sampling)

    assert token_ids.tolist() == sorted(reference_candidates(row, sampling))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_drawn_tokens_follow_the_distribution(options: dict[str, Any], along: str) -> None:
    row = logits_of(1.0, 0.2, -0.5, 2.0, 1.9, -3.0, 0.7, 0.0)
    draws = 4000
    counts = np.zeros(len(row))
    for i in range(draws):
        at, seed = (i, 7) if along == "positions" else (7, i)
        counts[sample(row, spec(position=at, seed=seed, **options), EOS).token_id] += 1

    expected = reference_candidates(row, spec(**options).sampling)
    assert set(np.flatnonzero(counts)) <= set(expected)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    # The 99.9th percentile for 7 degrees of freedom; the seeds are fixed, so this never flickers.
    assert chi_square < 24.3


def test_a_token_depends_on_logits_seed_and_position_alone() -> None:
    rows = [random_logits(i) for i in range(8)]
    specs = [spec(position=3 + i, seed=i % 3, temperature=1.0, top_p=0.9) for i in range(8)]
    alone = [sample(row, s, EOS).token_id for row, s in zip(rows, specs, strict=True)]

    np.random.seed(123)
    backwards = [sample(rows[i], specs[i], EOS).token_id for i in reversed(range(8))]

    assert backwards[::-1] == alone


def test_another_seed_or_position_gives_other_tokens() -> None:
    row = np.zeros(5000, dtype=np.float32)

    tokens = {
        sample(row, spec(position=p, seed=s), EOS).token_id for p in range(10) for s in range(10)
    }

    assert len(tokens) > 90


def test_the_random_numbers_are_the_same_on_every_machine() -> None:
    ids = np.array([0, 1, 49151])
    assert uniforms(0, 0, ids).tolist() == [
        0.14499364537359166,
        0.013675265639138068,
        0.8062793710007858,
    ]
    assert uniforms(2**64 - 1, 2**31, ids).tolist() == [
        0.26187097133613174,
        0.6069408847829247,
        0.13638716280001922,
    ]


def test_a_token_has_its_number_whoever_else_may_be_drawn() -> None:
    some = np.array([3, 70, 4000])
    assert uniforms(5, 9, some).tolist() == uniforms(5, 9, np.arange(5000))[some].tolist()


def test_the_last_bits_of_the_logits_change_no_token() -> None:
    """They are others in another batch; a vocabulary of today's size has many unlikely tokens."""
    error = np.random.default_rng(0).normal(size=49152).astype(np.float32) * np.float32(1e-4)
    for i in range(60):
        row = random_logits(i, vocab=49152)
        at = spec(position=i, seed=7, temperature=0.7)
        assert sample(row, at, EOS) == sample(row + error, at, EOS), i


def test_greedy_takes_the_likeliest_token_and_the_lowest_id_among_equals() -> None:
    assert sample(logits_of(1, 3, 2, 3), spec(temperature=0.0), EOS).token_id == 1


def test_top_k_one_is_greedy_whatever_the_seed() -> None:
    row = random_logits(5)

    chosen = {sample(row, spec(seed=s, top_k=1), EOS).token_id for s in range(20)}

    assert chosen == {int(row.argmax())}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_before_min_tokens_neither_eos_nor_stop_ids_are_chosen(temperature: float) -> None:
    row = logits_of(50, 40, 30, -50)
    options: dict[str, Any] = {
        "temperature": temperature,
        "min_tokens": 2,
        "stop_token_ids": (1, 99),
    }

    early = sample(row, spec(generated=1, **options), EOS).token_id
    later = sample(row, spec(generated=2, **options), EOS).token_id

    assert (early, later) == (2, 0)


def test_eos_may_be_chosen_when_it_is_ignored() -> None:
    assert sample(logits_of(9, 1), spec(temperature=0.0, ignore_eos=True), EOS).token_id == 0


def test_logprobs_are_those_of_the_raw_logits() -> None:
    row = logits_of(1, 2, 3, 2)
    total = math.log(sum(math.exp(x) for x in row.tolist()))
    options: dict[str, Any] = {
        "temperature": 5.0,
        "top_k": 2,
        "seed": 3,
        "min_tokens": 4,
        "stop_token_ids": (2,),
    }

    chosen = sample(row, spec(logprobs=3, **options), EOS)

    assert chosen.logprob == pytest.approx(row[chosen.token_id] - total)
    assert [t.token_id for t in chosen.top] == [2, 1, 3]
    assert [t.logprob for t in chosen.top] == pytest.approx([3 - total, 2 - total, 2 - total])


def test_logprobs_zero_gives_the_chosen_token_alone_and_none_gives_nothing() -> None:
    row = logits_of(1, 2)

    with_one = sample(row, spec(temperature=0.0, logprobs=0), EOS)
    without = sample(row, spec(temperature=0.0), EOS)

    assert with_one.top == () and with_one.logprob is not None
    assert without.logprob is None


def test_a_tiny_temperature_is_greedy_and_a_huge_one_does_not_overflow() -> None:
    row = random_logits(2)

    assert sample(row, spec(temperature=1e-12), EOS).token_id == int(row.argmax())
    assert 0 <= sample(row, spec(temperature=100.0), EOS).token_id < len(row)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(NotFinite, match="finite"):
        sample(logits_of(1, bad, 2), spec(temperature=0.0), EOS)


def test_it_is_refused_when_no_token_may_be_chosen() -> None:
    with pytest.raises(NotSampleable, match="no token") as refused:
        sample(logits_of(1, 2), spec(min_tokens=1, stop_token_ids=(1,)), EOS)
    assert not isinstance(refused.value, NotFinite)
