from __future__ import annotations

import pytest

from pd_grpc.bench.model import BOUND, POOL, SERIAL, THREADS5, Preparing, SeedModel
from pd_grpc.bench.workload import Length, spread_lengths
from pd_grpc.engine.step_table import StepTable

TEN_MS = StepTable(
    prefill=((1, 10.0), (2, 10.0)), decode=((1, 10.0), (2, 10.0)), decode_context_ms=0.0
)


def ends(lengths: list[Length], at_once: int, preparing: Preparing) -> list[float]:
    return SeedModel(lengths, at_once, TEN_MS, preparing).run()


def test_one_request_takes_its_prompt_and_one_step_for_each_token_after_the_first() -> None:
    assert ends([Length(100, 5)], 1, BOUND) == [10 + 4 * 10]


def test_an_answer_of_one_token_ends_with_its_prompt() -> None:
    assert ends([Length(100, 1)], 1, BOUND) == [10]


def test_requests_beyond_those_at_once_follow_when_others_end() -> None:
    assert ends([Length(100, 2)] * 3, 1, BOUND) == [20, 40, 60]


def test_prompts_that_are_ready_share_a_step_up_to_the_batch() -> None:
    done = ends([Length(100, 1)] * 18, 18, BOUND)
    assert done == [10] * 16 + [20] * 2


def test_one_at_a_time_waits_for_a_step_of_decode_each() -> None:
    # The first finds D idle. From then on D steps, and lets one in at the end of each step.
    one = Preparing(1, ahead=16)
    lengths = [Length(100, 20)] * 4
    serial, together = ends(lengths, 4, one), ends(lengths, 4, BOUND)
    assert together == [10 + 19 * 10] * 4
    assert serial[-1] >= together[-1] + 10


def test_the_more_may_wait_at_once_the_sooner_it_is_done() -> None:
    lengths = spread_lengths(200, 1280, 70)
    last = [ends(lengths, 64, how)[-1] for how in (SERIAL, THREADS5, POOL, BOUND)]
    assert last == sorted(last, reverse=True)
    assert last[0] > 1.05 * last[-1]
    assert last[2] == pytest.approx(last[3], rel=0.02)


def test_every_request_ends_once_and_in_order() -> None:
    done = ends(spread_lengths(300, 1280, 20), 32, POOL)
    assert len(done) == 300
    assert done == sorted(done)
