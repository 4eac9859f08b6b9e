"""The sim engine over several ranks: the KV that they hold together, and answers as of one."""

from __future__ import annotations

import pytest

from pd_grpc.engine.base import DecodeSlot, PrefillChunk, SampleSpec
from pd_grpc.engine.load import load_engine
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling

PROMPT = list(range(100, 121))
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
TABLE = (3, 0, 6, 5, 2, 7, 1)


def config(**settings: object) -> EngineConfig:
    """A small model."""
    shape = {"sim_layers": 5, "sim_heads": 4, "block_size": 4, "num_blocks": 8, "chunk_tokens": 8}
    return EngineConfig(**{"engine": "sim", **shape, **settings})


def answer(engine: SimEngine, tokens: int = 6) -> list[int]:
    """Prefill in three steps, then decode."""
    chosen: list[int] = []
    for start in range(0, len(PROMPT), 8):
        ids = PROMPT[start : start + 8]
        last = start + 8 >= len(PROMPT)
        spec = SampleSpec(GREEDY, len(PROMPT), 0) if last else None
        (sampled,) = engine.prefill([PrefillChunk(ids, start, TABLE, spec)], lambda g, n: None)
    assert sampled is not None
    chosen.append(sampled.token_id)
    return chosen + rest(engine, chosen, tokens)


def rest(engine: SimEngine, chosen: list[int], tokens: int) -> list[int]:
    """Decode until there are so many."""
    more: list[int] = []
    while len(chosen) + len(more) < tokens:
        position = len(PROMPT) + len(chosen) + len(more) - 1
        token = (chosen + more)[-1]
        spec = SampleSpec(GREEDY, position + 1, position + 1 - len(PROMPT))
        more.append(engine.decode([DecodeSlot(token, position, TABLE, spec)])[0].token_id)
    return more


WAYS = [(2, 1), (4, 1), (8, 1), (1, 2), (1, 5), (2, 3), (8, 2)]


@pytest.mark.parametrize(("tp", "pp"), WAYS)
def test_f32_the_answer_is_that_of_one_rank(tp: int, pp: int) -> None:
    one = sim_answer(PROMPT, GREEDY, config())
    engine = SimEngine(config(tp=tp, pp=pp))
    assert len(engine.shards) == tp * pp
    assert answer(engine) == one
    engine.close()


@pytest.mark.parametrize(("tp", "pp"), WAYS)
def test_the_ranks_hold_what_one_rank_holds(tp: int, pp: int) -> None:
    one, engine = SimEngine(config()), SimEngine(config(tp=tp, pp=pp))
    answer(one)
    answer(engine)
    for shard in engine.shards:
        part = shard.place.part
        for group, first, layers in part.runs(engine.layout):
            heads = part.head, part.heads
            wanted = one.memory.read(TABLE[:5], group, first, layers, heads)
            held = shard.memory.read(TABLE[:5], group, first, layers)
            assert b"".join(held) == b"".join(wanted)


@pytest.mark.parametrize(("tp", "pp"), WAYS)
def test_a_wrong_byte_on_any_rank_changes_the_answer(tp: int, pp: int) -> None:
    """Of heads that several ranks hold, on each of them."""
    right = sim_answer(PROMPT, GREEDY, config())
    for rank in range(tp * pp):
        engine = SimEngine(config(tp=tp, pp=pp))
        first = answer(engine, 1)
        shard = engine.shards[rank]
        group, layer, layers = shard.place.part.runs(engine.layout)[-1]
        stored = bytearray(b"".join(shard.memory.read([TABLE[1]], group, layer, layers)))
        stored[-1] ^= 1
        shard.memory.write([TABLE[1]], group, layer, layers, memoryview(stored))
        assert rest(engine, first, 6) != right[1:]


@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        ({"sim_layout": "fp8-scale"}, [(2, 1), (4, 1), (8, 2), (1, 3)]),
        # Its groups differ in their number of heads, so only its layers can be cut.
        ({"sim_layout": "sliding-fp8-scale", "sim_window": 7}, [(1, 2), (1, 5)]),
    ],
)
def test_other_layouts_are_cut_as_far_as_they_can_be(
    shape: dict[str, object], ways: list[tuple[int, int]]
) -> None:
    right = sim_answer(PROMPT, GREEDY, config(**shape))
    for tp, pp in ways:
        engine = SimEngine(config(tp=tp, pp=pp, **shape))
        assert answer(engine) == right
        engine.close()


def test_a_pool_of_another_order_has_one_rank_alone() -> None:
    with pytest.raises(ModelError) as error:
        load_engine(config(tp=2, sim_format="token-major"))
    assert error.value.field == "sim_format"


def test_only_sim_has_ranks() -> None:
    for field in ("tp", "pp"):
        with pytest.raises(ModelError, match="only sim") as error:
            load_engine(EngineConfig(**{"engine": "torch", field: 2}))
        assert error.value.field == field


def test_heads_and_ranks_must_divide() -> None:
    with pytest.raises(ModelError) as error:
        load_engine(config(tp=3))
    assert error.value.field == "tp"
    with pytest.raises(ModelError) as error:
        load_engine(config(pp=6))
    assert error.value.field == "pp"
