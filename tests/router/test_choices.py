"""The rules of several choices: when each begins, whose turn it is, and what they come to."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.faults import Reason
from pd_grpc.router.choices import Choices, knows_prompt, shares_prompt
from pd_grpc.router.policies import LeastLoad, Pairing, Target, pair_beside
from pd_grpc.v1 import types_pb2
from tests.router.recovering import D1, D2, D3, LOST, P1, P2, World, fault


@pytest.mark.parametrize(
    ("prompt", "block", "shared"), [(16, 16, False), (17, 16, True), (1, 16, False), (1, 0, True)]
)
def test_choices_share_whole_blocks_before_the_last_token(
    prompt: int, block: int, shared: bool
) -> None:
    """Of a block whose size is not known it may be so."""
    assert shares_prompt(prompt, block) is shared


def test_the_others_begin_once_when_the_first_knows_the_prompt() -> None:
    choices = Choices(3, held_back=True)
    assert list(choices.start()) == [0]
    assert list(choices.prompt_known()) == [1, 2]
    assert list(choices.prompt_known()) == []


def test_with_nothing_to_share_all_begin_at_once() -> None:
    choices = Choices(3, held_back=False)
    assert list(choices.start()) == [0, 1, 2]
    assert list(choices.prompt_known()) == []


def test_whoever_has_waited_longest_is_next_and_nobody_is_forgotten() -> None:
    choices = Choices(3, held_back=False)
    choices.start()
    for choice in (2, 0, 2, 1):
        choices.has_to_say(choice)
    assert [choices.next(), choices.next()] == [2, 0]
    choices.has_to_say(2)
    assert [choices.next(), choices.next(), choices.next()] == [1, 2, None]


def test_the_prompt_is_counted_once_and_the_answer_is_complete_with_the_last_of_all() -> None:
    choices = Choices(2, held_back=True)
    choices.start()
    choices.prompt_known()
    usage = types_pb2.Usage(prompt_tokens=40, completion_tokens=3, cached_tokens=32)
    choices.said_all(1, usage)
    before = choices.complete
    usage = types_pb2.Usage(prompt_tokens=40, completion_tokens=5, cached_tokens=16)
    choices.said_all(0, usage)
    assert (before, choices.complete) == (False, True)
    assert choices.total == types_pb2.Usage(prompt_tokens=40, completion_tokens=8, cached_tokens=16)


# --- when the prompt is known ---------------------------------------------------------------------


def test_the_prompt_is_known_when_it_is_handed_over() -> None:
    world = World().start()
    world.tokens(1, 1.0)
    assert not knows_prompt(world.request), "the first token is P's own"
    world.hands_over(1.0)
    assert knows_prompt(world.request)


def test_the_prompt_is_known_by_a_second_token_without_a_word_of_p() -> None:
    world = World().start()
    world.tokens(2, 1.0)
    assert knows_prompt(world.request)


def test_without_a_p_it_is_known_by_the_first_token() -> None:
    world = World(prefill=[]).start()
    assert not knows_prompt(world.request)
    world.tokens(1, 1.0)
    assert knows_prompt(world.request)


def test_one_that_is_tried_elsewhere_after_its_first_token_knows_nothing_there() -> None:
    world = World().start()
    world.tokens(1, 1.0)
    world.decode_fails(LOST, 1.0)
    assert world.request.attempt == 2 and not knows_prompt(world.request)
    world.hands_over(2.0)
    assert knows_prompt(world.request)


def test_one_that_has_failed_before_knows_nothing() -> None:
    world = World().start()
    world.prefill_fails(fault(Reason.BAD_REQUEST), 1.0)
    assert world.request.ended and not knows_prompt(world.request)


# --- to whom the others go ------------------------------------------------------------------------


def beside(prefill: Target | None, decode: Target, ps: list[Target], ds: list[Target]) -> Pairing:
    return pair_beside(prefill, decode, ps, ds, LeastLoad(), LeastLoad())


def test_the_others_go_to_whom_the_first_is_with() -> None:
    assert beside(P2, D2, [P1, P2], [D1, D2, D3]) == Pairing(P2, D2, (D1, D3))
    assert beside(None, D2, [], [D1, D2]) == Pairing(None, D2)


def test_whoever_takes_nothing_more_is_replaced_by_another_that_does() -> None:
    assert beside(P2, D2, [P1], [D1, D3]) == Pairing(P1, D1, (D3,))
    assert beside(None, D2, [], [D1]) == Pairing(None, D1)


def test_where_there_is_nobody_else_it_is_for_recovery_to_wait() -> None:
    assert beside(P2, D2, [], []) == Pairing(P2, D2)
