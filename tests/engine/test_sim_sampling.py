"""What the sim model makes of a request's sampling; `test_sim` has the engine agree with it."""

from __future__ import annotations

import random
import struct

import pytest

from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.engine.sim_tokenizer import EOS_ID
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling

# The largest vocabulary: two different digests choose the same token once in four billion.
SMALL = EngineConfig(engine="sim", block_size=4, sim_vocab=1 << 32)
# So few ids that end-of-sequence comes up all the time.
CHATTY = EngineConfig(engine="sim", block_size=4, sim_vocab=300)
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(max_tokens=8, temperature=0.7, top_p=0.9, top_k=40, seed=11, ignore_eos=True)


def prompt(length: int, seed: int = 0, vocab: int = 1 << 32) -> list[int]:
    """`length` token ids that look like nothing in particular."""
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(length)]


def test_greedy_knows_no_seed_and_neither_does_a_choice_among_one() -> None:
    ids = prompt(5)
    greedy = sim_answer(ids, GREEDY, SMALL)
    for seed in (0, 1, 2**64 - 1):
        assert greedy == sim_answer(
            ids, Sampling(8, temperature=0.0, seed=seed, ignore_eos=True), SMALL
        )
        assert greedy == sim_answer(
            ids, Sampling(8, temperature=0.9, top_k=1, seed=seed, ignore_eos=True), SMALL
        )


@pytest.mark.parametrize(
    "other",
    [
        Sampling(8, temperature=0.7, top_p=0.9, top_k=40, seed=12, ignore_eos=True),
        Sampling(8, temperature=0.8, top_p=0.9, top_k=40, seed=11, ignore_eos=True),
        Sampling(8, temperature=0.7, top_p=0.8, top_k=40, seed=11, ignore_eos=True),
        Sampling(8, temperature=0.7, top_p=0.9, top_k=41, seed=11, ignore_eos=True),
        GREEDY,
    ],
)
def test_each_sampling_field_matters_to_every_sampled_token(other: Sampling) -> None:
    ids = prompt(5)
    ours, theirs = sim_answer(ids, SEEDED, SMALL), sim_answer(ids, other, SMALL)
    assert ours[0] != theirs[0] and not set(ours) & set(theirs)


def test_a_value_that_went_through_a_single_on_the_wire_chooses_the_same() -> None:
    (rounded,) = struct.unpack("<f", struct.pack("<f", SEEDED.temperature))
    assert rounded != SEEDED.temperature
    again = Sampling(8, temperature=rounded, top_p=0.9, top_k=40, seed=11, ignore_eos=True)
    assert sim_answer(prompt(5), again, SMALL) == sim_answer(prompt(5), SEEDED, SMALL)


def test_neither_end_of_sequence_nor_a_stop_id_comes_before_min_tokens() -> None:
    stop_ids = tuple(range(100, 160))
    early = late = 0
    for seed in range(200):
        ids = prompt(3, seed, CHATTY.sim_vocab)
        free = Sampling(6, temperature=1.0, seed=seed, stop_token_ids=stop_ids)
        held = Sampling(6, 4, temperature=1.0, seed=seed, stop_token_ids=stop_ids)
        early += len(sim_answer(ids, free, CHATTY)) < 4
        answer = sim_answer(ids, held, CHATTY)
        assert not {EOS_ID, *stop_ids} & set(answer[:4])
        late += answer[-1] in (EOS_ID, *stop_ids)
    assert early > 50 and late > 20
