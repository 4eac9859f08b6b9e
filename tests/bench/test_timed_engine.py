from __future__ import annotations

import pytest

from pd_grpc.bench.timed_engine import TimedEngine
from pd_grpc.engine.base import DecodeSlot, PrefillChunk, SampleSpec
from pd_grpc.engine.step_table import StepTable
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling

STEPS = StepTable(
    prefill=((1, 30.0), (2, 30.0)), decode=((1, 10.0), (2, 20.0)), decode_context_ms=0.0
)
SPEC = SampleSpec(Sampling(max_tokens=9), 1, 0)
SLOT = DecodeSlot(5, 0, (0,), SPEC)


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def engine(time: Time) -> TimedEngine:
    config = EngineConfig(engine="sim", num_blocks=2)
    return TimedEngine(config, STEPS, time_scale=0.5, now=time.now, sleep=time.sleep)


def no_layer(group: int, layer: int) -> None:
    """Nothing is sent."""


def test_a_step_takes_its_time_in_the_table_times_the_scale(
    engine: TimedEngine, time: Time
) -> None:
    engine.decode([SLOT, SLOT])
    assert time.at == pytest.approx(100.010)
    engine.prefill([PrefillChunk((5,), 0, (0,))], no_layer)
    assert time.at == pytest.approx(100.025)


def test_what_the_host_does_between_two_steps_of_decode_overlaps_them(
    engine: TimedEngine, time: Time
) -> None:
    engine.decode([SLOT])
    time.at += 0.004
    engine.decode([SLOT])
    assert time.at == pytest.approx(100.010)


def test_a_host_that_takes_longer_than_a_step_is_all_that_takes_time(
    engine: TimedEngine, time: Time
) -> None:
    engine.decode([SLOT])
    time.at += 0.008
    engine.decode([SLOT])
    assert time.at == pytest.approx(100.013)


def test_a_step_after_a_pause_takes_its_whole_time(engine: TimedEngine, time: Time) -> None:
    engine.decode([SLOT])
    time.at += 1.0
    engine.decode([SLOT])
    assert time.at == pytest.approx(101.010)


def test_a_token_comes_out_for_every_slot_and_for_the_last_chunk_of_a_prompt(
    engine: TimedEngine,
) -> None:
    assert len(engine.decode([SLOT, SLOT])) == 2
    chunks = [PrefillChunk((5,), 0, (0,)), PrefillChunk((5,), 0, (0,), SPEC)]
    unfinished, last = engine.prefill(chunks, no_layer)
    assert unfinished is None
    assert last is not None
    assert engine.chunks_computed == 2


def test_the_door_hears_of_every_step(engine: TimedEngine) -> None:
    heard: list[bool] = []
    engine.on_step = heard.append
    engine.decode([SLOT])
    engine.prefill([PrefillChunk((5,), 0, (0,))], no_layer)
    assert heard == [True, False, True, False]
