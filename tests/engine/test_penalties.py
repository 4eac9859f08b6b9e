"""Bias, penalties and filters against transformers' own, and where they meet extremes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pd_grpc.engine.base import SampleSpec
from pd_grpc.engine.penalties import Tally, penalise, tally
from pd_grpc.engine.sampler import Logits, candidates, sample
from pd_grpc.protocol.sampling import Sampling

VOCAB = 40
EOS = frozenset({0})

ids = st.integers(0, VOCAB - 1)
tokens = st.lists(ids, max_size=30)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 39, 1000]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.7, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.2, 10.0]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=6).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
)


def logits_of(seed: int) -> Logits:
    return (np.random.default_rng(seed).normal(size=VOCAB) * 4).astype(np.float32)


def spec(sampling: Sampling, prompt: list[int], output: list[int]) -> SampleSpec:
    position = len(prompt) + len(output)
    return SampleSpec(sampling, position, len(output), tally(prompt, output))


class Openai(LogitsProcessor):
    """The formula of OpenAI's reference for frequency and presence, a token at a time."""

    def __init__(self, sampling: Sampling, output: list[int]) -> None:
        self.sampling, self.output = sampling, output

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        changed = scores.clone()
        for token_id in range(scores.shape[1]):
            count = self.output.count(token_id)
            changed[0, token_id] -= count * self.sampling.frequency_penalty
            changed[0, token_id] -= float(count > 0) * self.sampling.presence_penalty
        return changed


def as_transformers(
    row: Logits, s: Sampling, prompt: list[int], output: list[int]
) -> npt.NDArray[np.float64]:
    """The scores after transformers' processors in the order of our reference; what is cut off is
    minus infinity."""
    steps: Any = LogitsProcessorList()
    if s.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[i], bias] for i, bias in s.logit_bias]))
    if s.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    steps.append(Openai(s, output))
    if s.temperature:
        steps.append(TemperatureLogitsWarper(s.temperature))
        if s.min_p:
            steps.append(MinPLogitsWarper(s.min_p))
        if s.top_k:
            steps.append(TopKLogitsWarper(s.top_k))
        if s.top_p < 1:
            steps.append(TopPLogitsWarper(s.top_p))
    scores = torch.from_numpy(row).double()[None]
    changed: npt.NDArray[np.float64] = steps(torch.tensor([prompt + output]), scores)[0].numpy()
    return changed


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10_000), s=samplings, prompt=st.lists(ids, min_size=1), output=tokens)
def test_the_choice_is_among_what_transformers_leaves(
    seed: int, s: Sampling, prompt: list[int], output: list[int]
) -> None:
    row = logits_of(seed)

    chosen = sample(row, spec(s, prompt, output), EOS).token_id

    expected = as_transformers(row, s, prompt, output)
    if s.greedy:
        assert chosen == int(expected.argmax())
    else:
        assert np.isfinite(expected[chosen])


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10_000), s=samplings, prompt=st.lists(ids, min_size=1), output=tokens)
def test_penalised_and_filtered_weights_are_those_of_transformers(
    seed: int, s: Sampling, prompt: list[int], output: list[int]
) -> None:
    s = Sampling(**{**vars(s), "temperature": s.temperature or 1.0, "logit_bias": ()})
    row = logits_of(seed)

    changed = row.astype(np.float64)
    penalise(changed, s, tally(prompt, output))
    token_ids, weights = candidates(changed, s)

    expected = as_transformers(row, s, prompt, output)
    assert token_ids.tolist() == np.flatnonzero(np.isfinite(expected)).tolist()
    shares = np.exp(expected - expected.max())[token_ids]
    np.testing.assert_allclose(weights / weights.sum(), shares / shares.sum(), rtol=1e-9)


@settings(max_examples=100, deadline=None)
@given(prompt=tokens, given_=tokens, said=tokens)
def test_a_tally_that_grew_is_that_of_all_tokens_at_once(
    prompt: list[int], given_: list[int], said: list[int]
) -> None:
    grown = tally(prompt, given_)
    before = counted(grown)
    for token_id in said:
        grown = grown.followed_by(token_id)

    assert counted(grown) == counted(tally(prompt, given_ + said))
    assert counted(tally(prompt, given_)) == before
    assert grown.generated == len(given_) + len(said)


def counted(so_far: Tally) -> tuple[set[int], Counter[int]]:
    counts = dict(zip(so_far.output.tolist(), so_far.counts.tolist(), strict=True))
    assert len(counts) == len(so_far.output)
    prompt = so_far.prompt.ids.tolist()
    assert len({*prompt}) == len(prompt)
    return {*prompt}, Counter(counts)


def test_what_follows_leaves_the_tally_before_as_it_was() -> None:
    first = tally([1], [2])
    first.followed_by(2)
    first.followed_by(3)
    assert counted(first) == ({1}, Counter({2: 1}))


def test_presence_and_frequency_do_not_count_the_prompt_and_repetition_does() -> None:
    row = np.array([0, 3.0, 2.0], dtype=np.float32)

    def likeliest(prompt: list[int], output: list[int], **options: float) -> int:
        sampling = Sampling(max_tokens=9, temperature=0.0, **options)  # type: ignore[arg-type]
        return sample(row, spec(sampling, prompt, output), EOS).token_id

    assert likeliest([1], [], presence_penalty=2.0, frequency_penalty=2.0) == 1
    assert likeliest([0], [1], presence_penalty=2.0) == 2
    assert likeliest([0], [1], frequency_penalty=0.6) == 1
    assert likeliest([0], [1, 1], frequency_penalty=0.6) == 2
    assert likeliest([1], [], repetition_penalty=2.0) == 2
    assert likeliest([0], [1], repetition_penalty=2.0) == 2
    # Once, whether it stands in one of them or in both.
    assert likeliest([1], [1], repetition_penalty=1.4) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [5e-324, 1e-308, 1e308, 1.7e308])
def test_no_penalty_leaves_nothing_to_choose(temperature: float, penalty: float) -> None:
    sampling = Sampling(
        max_tokens=9, temperature=temperature, repetition_penalty=penalty, frequency_penalty=2.0
    )
    for row in (logits_of(1), -np.abs(logits_of(1)), np.full(VOCAB, -3e38, dtype=np.float32)):
        at = spec(sampling, [*range(VOCAB)], [3] * 9)
        with np.errstate(all="raise", under="ignore", divide="ignore", over="ignore"):
            assert 0 <= sample(row, at, EOS).token_id < VOCAB


def test_what_the_model_rules_out_stays_so() -> None:
    row = logits_of(2)
    row[7] = -np.inf
    biased = Sampling(
        max_tokens=9, temperature=0.0, repetition_penalty=0.01, logit_bias=((7, 100.0),)
    )
    assert sample(row, spec(biased, [7], [7]), EOS).token_id != 7


def test_a_bias_of_minus_100_is_no_ban() -> None:
    row = np.zeros(3, dtype=np.float32)
    banned = ((0, -100.0), (1, -100.0), (2, -99.0))
    sampling = Sampling(max_tokens=9, temperature=0.0, logit_bias=banned)
    assert sample(row, spec(sampling, [1], []), EOS).token_id == 2
    far = np.array([250, 0, 0], dtype=np.float32)
    assert sample(far, spec(sampling, [1], []), EOS).token_id == 0


def test_no_bias_lets_an_answer_end_before_min_tokens() -> None:
    row = logits_of(3)
    sampling = Sampling(
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        stop_token_ids=(5,),
        logit_bias=((0, 100.0), (5, 100.0)),
        repetition_penalty=0.01,
    )
    early = sample(row, spec(sampling, [0, 5], [0]), EOS).token_id
    later = sample(row, spec(sampling, [0, 5], [0, 5]), EOS).token_id
    assert early not in (0, 5)
    assert later in (0, 5)


def test_bias_comes_before_the_repetition_penalty() -> None:
    """-1 + 3.2 is halved to 1.1; in the other order it would be doubled to -2, and then be 1.2."""
    row = np.array([1.15, -1.0], dtype=np.float32)
    sampling = Sampling(
        max_tokens=9, temperature=0.0, repetition_penalty=2.0, logit_bias=((1, 3.2),)
    )
    assert sample(row, spec(sampling, [1], []), EOS).token_id == 0


def test_logprobs_are_those_before_bias_and_penalties() -> None:
    row = logits_of(4)
    plain = Sampling(max_tokens=9, temperature=0.0, logprobs=5)
    changed = Sampling(
        **{
            **vars(plain),
            "repetition_penalty": 3.0,
            "presence_penalty": 1.0,
            "logit_bias": ((11, 100.0),),
        }
    )
    as_is = sample(row, spec(plain, [1], [2]), EOS)
    chosen = sample(row, spec(changed, [1], [2]), EOS)
    assert chosen.token_id == 11
    assert chosen.top == as_is.top
    total = math.log(np.exp(row.astype(np.float64)).sum())
    assert chosen.logprob == pytest.approx(float(row[11]) - total)


def test_the_logits_of_the_model_are_left_as_they_are() -> None:
    row = logits_of(5)
    before = row.copy()
    sampling = Sampling(
        max_tokens=9,
        min_tokens=5,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        min_p=0.1,
        logit_bias=((3, 5.0),),
    )
    sample(row, spec(sampling, [1, 3], [2, 3]), EOS)
    assert (row == before).all()


def test_a_large_vocabulary_and_a_long_prompt_are_no_matter() -> None:
    vocab = 256_000
    rng = np.random.default_rng(6)
    row = rng.normal(size=vocab).astype(np.float32)
    prompt = rng.integers(0, vocab, 100_000).tolist()
    sampling = Sampling(max_tokens=9, temperature=0.0, repetition_penalty=2.0)
    unseen = row.copy()
    unseen[prompt] = np.where(row[prompt] > 0, row[prompt] / 2, row[prompt] * 2)
    assert sample(row, spec(sampling, prompt, [5]), EOS).token_id == int(unseen.argmax())


def test_min_p_one_keeps_the_likeliest_and_its_equals() -> None:
    row = np.array([1, 3, 2, 3], dtype=np.float32)
    token_ids, _ = candidates(row, Sampling(max_tokens=9, min_p=1.0))
    assert token_ids.tolist() == [1, 3]


def test_a_temperature_near_zero_draws_the_likeliest_without_overflow() -> None:
    row = logits_of(8)
    token_ids, weights = candidates(row, Sampling(max_tokens=9, temperature=5e-324))
    assert token_ids[weights > 0].tolist() == [int(row.argmax())]
