"""Which tokens of which prompts a step computes, as rules alone."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.engine.chunks import ChunkShares, Left, cut_of, step_budget
from pd_grpc.protocol.config import EngineConfig

CUT = 128


def ends_after(prompts: list[int], room: int, batch: int = 8) -> list[int]:
    """For each prompt, of so many tokens, the number of the step in which it ends."""
    shares = ChunkShares(CUT, batch)
    left = dict(enumerate(Left(0, tokens) for tokens in prompts))
    ended: dict[int, int] = {}
    for step in count(1):
        dealt = shares.deal(list(left.values()), room)
        for (i, prompt), tokens in zip(list(left.items()), dealt, strict=True):
            left[i] = Left(prompt.start + tokens, prompt.tokens - tokens)
            if not left[i].tokens:
                ended[i] = step
                del left[i]
        if not left:
            return [ended[i] for i in range(len(prompts))]
    raise AssertionError


def test_eight_short_prompts_end_in_one_step() -> None:
    assert ends_after([32] * 8, room=512) == [1] * 8


def test_no_more_than_the_batch_take_part() -> None:
    assert ends_after([32] * 8, room=512, batch=3) == [1, 1, 1, 2, 2, 2, 3, 3]


def test_prompts_of_one_length_end_in_turn() -> None:
    assert ends_after([512] * 4, room=512) == [1, 2, 3, 4]
    assert ends_after([1000] * 3, room=512) == [2, 4, 6]


def test_a_short_prompt_passes_a_long_one_by() -> None:
    assert ends_after([4096, 100], room=512) == [9, 1]
    assert ends_after([4096, 800, 100], room=512)[1:] == [8, 1], "the shortest first"


def test_a_prompt_hardly_shorter_than_the_oldest_waits() -> None:
    alone = ends_after([2048], room=512)
    assert ends_after([2048, 1024], room=512) == [*alone, alone[0] + 2]


def test_short_prompts_without_end_do_not_starve_the_oldest() -> None:
    steps = 11  # three of four cuts each
    assert ends_after([4096, *[128] * 20], room=512)[0] == steps


def test_a_step_of_one_cut_is_the_oldests() -> None:
    assert ends_after([512, 64], room=CUT) == [4, 5]


prompts = st.builds(Left, st.integers(0, 600), st.integers(1, 2000))


@given(st.lists(prompts, min_size=1, max_size=10), st.integers(CUT, 1200), st.integers(1, 8))
def test_what_is_dealt_fits_and_ends_at_a_cut(waiting: list[Left], room: int, batch: int) -> None:
    dealt = ChunkShares(CUT, batch).deal(waiting, room)

    assert dealt[0] > 0, "the oldest goes on"
    assert sum(dealt) <= room
    assert sum(tokens > 0 for tokens in dealt) <= batch
    for prompt, tokens in zip(waiting, dealt, strict=True):
        assert 0 <= tokens <= prompt.tokens
        assert tokens in (0, prompt.tokens) or (prompt.start + tokens) % CUT == 0


@given(st.lists(prompts, min_size=1, max_size=6), st.integers(CUT, 1200))
def test_no_room_is_left_that_somebody_could_use(waiting: list[Left], room: int) -> None:
    dealt = ChunkShares(CUT, 8).deal(waiting, room)

    over = room - sum(dealt)
    for prompt, tokens in zip(waiting, dealt, strict=True):
        rest = prompt.tokens - tokens
        to_cut = CUT - (prompt.start + tokens) % CUT
        assert not rest or min(rest, to_cut) > over


def test_nothing_waits() -> None:
    assert ChunkShares(CUT, 8).deal([], 512) == []


@pytest.mark.parametrize(
    ("settings", "cut", "budget"),
    [
        ({}, 128, 288),
        ({"chunk_tokens": 64}, 64, 160),
        ({"chunk_tokens": 192}, 192, 416),
        ({"max_batch": 500}, 128, 756),
        ({"step_tokens": 2048}, 128, 2048),
    ],
)
def test_a_step_has_room_for_a_full_batch_and_two_cuts(
    settings: dict[str, int], cut: int, budget: int
) -> None:
    config = EngineConfig(**settings)

    assert (cut_of(config), step_budget(config)) == (cut, budget)
