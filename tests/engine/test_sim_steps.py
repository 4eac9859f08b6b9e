"""A step of the sim engine: its layers, its time, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pd_grpc.engine.base import DecodeSlot, EngineFault, PrefillChunk, SampleSpec
from pd_grpc.engine.sim import SIM_MODEL_LEN, SimEngine
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.engine.step_table import StepTable
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling

SMALL = EngineConfig(
    engine="sim", block_size=4, num_blocks=24, sim_layers=3, sim_heads=2, sim_head_dim=8
)
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
STEPS = StepTable(prefill=((1, 3.0), (11, 33.0)), decode=((1, 5.0), (2, 6.0)), decode_context_ms=1)
GOOD = SampleSpec(GREEDY, 5, 0)
IDS = [5, 31000, 77, 4, 9000, 12, 700]


def no_callback(group: int, layer: int) -> None:
    """For steps that nobody follows layer by layer."""


def first_token(engine: SimEngine) -> int | None:
    """The token after IDS, prefilled into blocks 3 and 1."""
    (sampled,) = engine.prefill(
        [PrefillChunk(IDS, 0, [3, 1], SampleSpec(GREEDY, len(IDS), 0))], no_callback
    )
    return None if sampled is None else sampled.token_id


def test_each_layer_is_reported_once_all_of_it_is_in_the_pool_and_none_of_the_next() -> None:
    engine = SimEngine(SMALL)
    blocks = [7, 2, 0, 9]
    seen: list[tuple[int, int]] = []
    slabs: list[bytes] = []

    def on_layer(group: int, layer: int) -> None:
        seen.append((group, layer))
        slabs.append(b"".join(engine.memory.read(blocks, group, layer, 1)))
        for later in range(layer + 1, SMALL.sim_layers):
            assert not any(b"".join(engine.memory.read(blocks, group, later, 1)))

    one, other = list(range(10, 18)), list(range(20, 28))
    engine.prefill([PrefillChunk(one, 0, [7, 2]), PrefillChunk(other, 0, [0, 9])], on_layer)
    assert seen == [(0, 0), (0, 1), (0, 2)]
    for layer in range(SMALL.sim_layers):
        assert slabs[layer] == b"".join(engine.memory.read(blocks, 0, layer, 1))


def test_what_a_layer_callback_raises_ends_the_step_and_the_engine_goes_on() -> None:
    class Gone(Exception):
        pass

    engine = SimEngine(SMALL)
    seen = []

    def on_layer(group: int, layer: int) -> None:
        seen.append(layer)
        if layer == 1:
            raise Gone

    with pytest.raises(Gone):
        engine.prefill([PrefillChunk(IDS, 0, [3, 1])], on_layer)
    assert seen == [0, 1]
    assert first_token(engine) == sim_answer(IDS, GREEDY, SMALL)[0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sim_heads": 1, "sim_head_dim": 15}, "sim_head_dim"),
        ({"sim_vocab": (1 << 32) + 1}, "sim_vocab"),
        ({"max_model_len": SIM_MODEL_LEN + 1}, "max_model_len"),
        ({"sim_vocab": 259}, "vocab_size"),
    ],
)
def test_a_shape_the_sim_model_cannot_have_is_refused_by_the_fields_name(
    change: dict[str, int], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        SimEngine(SMALL.model_copy(update=change))


def test_limits_and_names_are_the_configured_ones() -> None:
    engine = SimEngine(SMALL.model_copy(update={"max_model_len": 77}))
    assert (engine.max_model_len, engine.vocab_size) == (77, 32000)
    assert SimEngine(SMALL).max_model_len == SIM_MODEL_LEN
    assert engine.layout.block_bytes == 3 * 2 * 2 * 4 * 8
    assert engine.memory.num_blocks == SMALL.num_blocks
    other = SimEngine(SMALL.model_copy(update={"sim_vocab": 300})).layout
    assert [diff.field for diff in engine.layout.differences(other)] == ["model"]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda e: e.prefill([PrefillChunk([], 0, [0])], no_callback), "0 tokens"),
        (lambda e: e.prefill([PrefillChunk([1], -1, [0])], no_callback), "position -1"),
        (lambda e: e.prefill([PrefillChunk([1] * 5, 0, [0])], no_callback), "in 1 blocks"),
        (lambda e: e.prefill([PrefillChunk([1], 0, [24])], no_callback), "outside the pool"),
        (lambda e: e.prefill([PrefillChunk([1], 0, [-1])], no_callback), "outside the pool"),
        (lambda e: e.prefill([PrefillChunk([32000], 0, [0])], no_callback), "vocabulary"),
        (lambda e: e.prefill([PrefillChunk([-1], 0, [0])], no_callback), "vocabulary"),
        (lambda e: e.prefill([PrefillChunk([1] * 4, 0, [0], GOOD)], no_callback), "not at 5"),
        (lambda e: e.decode([DecodeSlot(1, 4, [0], GOOD)]), "in 1 blocks"),
        (lambda e: e.decode([DecodeSlot(1, 5, [0, 1], GOOD)]), "not at 5"),
        (
            lambda e: e.decode([DecodeSlot(1, 4, [0, 1], GOOD), DecodeSlot(1, 4, [0, 99], GOOD)]),
            "outside the pool",
        ),
    ],
)
def test_an_impossible_batch_is_a_fault_and_writes_nothing(
    step: Callable[[SimEngine], object], message: str
) -> None:
    engine = SimEngine(SMALL)
    with pytest.raises(EngineFault, match=message):
        step(engine)
    everything = engine.memory.read(range(SMALL.num_blocks), 0, 0, SMALL.sim_layers)
    assert not any(b"".join(everything))
    assert first_token(engine) == sim_answer(IDS, GREEDY, SMALL)[0]


def test_a_prefill_step_takes_its_time_in_equal_parts_before_each_layer() -> None:
    events: list[object] = []
    config = SMALL.model_copy(update={"sim_time_scale": 2.0})
    engine = SimEngine(config, sleep=events.append, steps=STEPS)
    chunks = [PrefillChunk(IDS[:5], 0, [0, 1]), PrefillChunk(IDS[:6], 0, [2, 3])]
    engine.prefill(chunks, lambda group, layer: events.append(("layer", layer)))
    third = pytest.approx(0.033 * 2 / 3)
    assert events == [third, ("layer", 0), third, ("layer", 1), third, ("layer", 2)]


def test_a_decode_step_takes_the_time_of_its_batch_and_contexts() -> None:
    slept: list[float] = []
    config = SMALL.model_copy(update={"sim_time_scale": 0.5})
    engine = SimEngine(config, sleep=slept.append, steps=STEPS)
    engine.decode(
        [
            DecodeSlot(1, 0, [0], SampleSpec(GREEDY, 1, 0)),
            DecodeSlot(1, 0, [1], SampleSpec(GREEDY, 1, 0)),
        ]
    )
    engine.decode([DecodeSlot(1, 1, [0], SampleSpec(GREEDY, 2, 1))])
    assert slept == [pytest.approx(0.003), pytest.approx(0.003)]


def test_a_step_of_both_takes_the_time_of_one_pass_and_the_next_its_own() -> None:
    slept: list[float] = []
    config = SMALL.model_copy(update={"sim_time_scale": 1.0})
    engine = SimEngine(config, sleep=slept.append, steps=STEPS)
    chunk = PrefillChunk(IDS[:5], 0, [0, 1])
    slots = [DecodeSlot(1, 0, [block], SampleSpec(GREEDY, 1, 0)) for block in (2, 3)]
    prefilled, decoded = engine.step([chunk], slots, no_callback)
    assert (len(prefilled), len(decoded)) == (1, 2)
    assert sum(slept) == pytest.approx(0.001 * STEPS.mixed_ms(5, 2, 0)) == 0.0231
    slept.clear()
    engine.step([], slots[:1], no_callback)
    assert slept == [pytest.approx(0.005)]


def test_a_time_scale_of_zero_never_sleeps() -> None:
    slept: list[float] = []
    engine = SimEngine(SMALL, sleep=slept.append, steps=STEPS)
    engine.prefill([PrefillChunk(IDS[:4], 0, [0])], no_callback)
    engine.decode([DecodeSlot(1, 0, [0], SampleSpec(GREEDY, 1, 0))])
    assert slept == []
