"""The sim engine: the right KV gives the right answer, and any other KV another one."""

from __future__ import annotations

import hashlib
import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_grpc.blocks.pool import BlockPool, BlockState, Holding
from pd_grpc.engine.base import DecodeSlot, PrefillChunk, SampleSpec
from pd_grpc.engine.sim import SIM_MODEL_LEN, SimEngine
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.engine.stopping import StopRule
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling

SMALL = EngineConfig(
    engine="sim",
    block_size=4,
    num_blocks=24,
    sim_layers=3,
    sim_heads=2,
    sim_head_dim=8,
    # The largest vocabulary: two different checksums choose the same token once in four billion.
    sim_vocab=1 << 32,
)
CHATTY = SMALL.model_copy(update={"sim_vocab": 300})
"""So few ids that end-of-sequence comes up all the time."""

GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(max_tokens=8, temperature=0.7, top_p=0.9, top_k=40, seed=11, ignore_eos=True)


def no_callback(group: int, layer: int) -> None:
    """For steps that nobody follows layer by layer."""


class Side:
    """An engine with a pool that hands its blocks out in no particular order."""

    def __init__(self, config: EngineConfig, shuffle: int = 0) -> None:
        self.config = config
        self.engine = SimEngine(config)
        self.pool = BlockPool(config.num_blocks)
        held = [self.pool.reserve(1) for _ in range(config.num_blocks)]
        random.Random(shuffle).shuffle(held)
        for holding in held:
            holding.release()

    def take(self, tokens: int) -> Holding:
        """Blocks for so many tokens."""
        return self.pool.reserve(self.engine.layout.blocks_for(tokens), BlockState.COMPUTING)

    def prefill(
        self, holding: Holding, ids: Sequence[int], sampling: Sampling, chunk: int = SIM_MODEL_LEN
    ) -> int:
        """Prefill `ids`, `chunk` tokens at a time; the token that follows."""
        for start in range(0, len(ids), chunk):
            some = ids[start : start + chunk]
            last = start + len(some) == len(ids)
            spec = SampleSpec(sampling, len(ids), 0) if last else None
            piece = PrefillChunk(some, start, holding.blocks, spec)
            (sampled,) = self.engine.prefill([piece], no_callback)
            assert (sampled is not None) == last
        assert sampled is not None
        return sampled.token_id

    def step(
        self, holding: Holding, prompt_len: int, output: Sequence[int], sampling: Sampling
    ) -> int:
        """One decode step of one request: the token after `output`."""
        tokens = prompt_len + len(output)
        holding.grow(self.engine.layout.blocks_for(tokens) - len(holding.blocks))
        spec = SampleSpec(sampling, tokens, len(output))
        (sampled,) = self.engine.decode([DecodeSlot(output[-1], tokens - 1, holding.blocks, spec)])
        return sampled.token_id

    def finish(
        self, holding: Holding, prompt_len: int, first: int, sampling: Sampling
    ) -> list[int]:
        """Decode until the request ends; the whole output, and the blocks given back."""
        holding.move(BlockState.DECODING)
        rule = StopRule(sampling, self.engine.eos_token_ids, self.engine.tokenizer())
        output = [first]
        while rule.push(output[-1]) is None:
            output.append(self.step(holding, prompt_len, output, sampling))
        holding.release()
        return output

    def answer(
        self, ids: Sequence[int], sampling: Sampling, chunk: int = SIM_MODEL_LEN
    ) -> list[int]:
        """A whole request on this side alone."""
        holding = self.take(len(ids))
        first = self.prefill(holding, ids, sampling, chunk)
        return self.finish(holding, len(ids), first, sampling)

    def read(self, block: int) -> bytes:
        """A copy of one whole block."""
        return bytes(self.engine.memory.read([block], 0, 0, self.config.sim_layers)[0])

    def write(self, block: int, payload: bytes) -> None:
        """Put a whole block in place."""
        layers = self.config.sim_layers
        self.engine.memory.write([block], 0, 0, layers, memoryview(payload))

    def check_all_returned(self) -> None:
        """The pool's conservation, with every block back."""
        self.pool.check()
        assert self.pool.counts()[BlockState.FREE] == self.pool.total


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side(SMALL)
    yield side
    for holding in side.pool.holdings():
        holding.release()
    side.check_all_returned()


def prompt(length: int, seed: int = 0, vocab: int = SMALL.sim_vocab) -> list[int]:
    """`length` token ids that look like nothing in particular."""
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(length)]


def test_the_bytes_of_a_token_lie_where_the_rule_says(side: Side) -> None:
    ids = prompt(6)
    holding = side.take(6)
    side.prefill(holding, ids, GREEDY)
    chain = bytes(16)
    for position, token_id in enumerate(ids):
        chain = hashlib.sha256(chain + struct.pack("<I", token_id)).digest()[:16]
        kv = chain + hashlib.shake_128(chain).digest(3 * 2 * 2 * 8 - 16)
        block = side.read(holding.blocks[position // 4])
        for layer in range(3):
            for plane in range(2):
                for head in range(2):
                    row = (layer * 2 + plane) * 2 + head
                    at = (row * 4 + position % 4) * 8
                    assert block[at : at + 8] == kv[row * 8 : row * 8 + 8]


def test_the_checksum_is_crc32c() -> None:
    def bitwise(data: bytes) -> int:
        crc = 0xFFFFFFFF
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        return crc ^ 0xFFFFFFFF

    assert bitwise(b"123456789") == 0xE3069283  # the check value of the CRC catalogues
    data = random.Random(1).randbytes(1000)
    assert google_crc32c.extend(google_crc32c.value(data[:300]), data[300:]) == bitwise(data)


def test_the_rule_does_not_change_unnoticed() -> None:
    config = EngineConfig(engine="sim")
    hello = [3 + byte for byte in b"Hello, world"]
    greedy = Sampling(max_tokens=4, temperature=0.0)
    seeded = Sampling(max_tokens=4, temperature=0.5, top_p=0.75, top_k=7, seed=2**64 - 1)
    assert sim_answer(hello, greedy, config) == [16236, 31993, 29435, 26366]
    assert sim_answer(hello, seeded, config) == [26173, 17917, 28234, 17652]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    chunk=st.integers(1, 41),
    sampling=st.builds(
        Sampling,
        max_tokens=st.integers(8, 12),
        min_tokens=st.integers(0, 8),
        temperature=st.sampled_from([0.0, 0.3, 1.0]),
        top_p=st.sampled_from([0.1, 1.0]),
        top_k=st.sampled_from([0, 1, 50]),
        seed=st.integers(0, 2**64 - 1),
        stop=st.sampled_from([(), (" w29",)]),
        stop_token_ids=st.sampled_from([(), tuple(range(20, 80))]),
        ignore_eos=st.booleans(),
    ),
    shape=st.sampled_from(
        [CHATTY, CHATTY.model_copy(update={"block_size": 7, "sim_heads": 1, "sim_head_dim": 19})]
    ),
)
def test_an_answer_through_the_pool_is_the_reference_answer(
    length: int, seed: int, chunk: int, sampling: Sampling, shape: EngineConfig
) -> None:
    side = Side(shape, shuffle=seed)
    ids = prompt(length, seed, shape.sim_vocab)
    assert side.answer(ids, sampling, chunk) == sim_answer(ids, sampling, shape)
    side.check_all_returned()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16])
def test_prefill_in_chunks_is_prefill_at_once(side: Side, length: int, chunk: int) -> None:
    ids = prompt(length)
    whole, pieces = side.take(length), side.take(length)
    assert side.prefill(whole, ids, SEEDED) == side.prefill(pieces, ids, SEEDED, chunk)
    assert [side.read(b) for b in whole.blocks] == [side.read(b) for b in pieces.blocks]


def test_a_context_of_many_blocks_is_checksummed_whole() -> None:
    # More blocks than are copied together for a checksum.
    config = SMALL.model_copy(update={"block_size": 1, "num_blocks": 1200})
    side = Side(config)
    ids = prompt(1100)
    sampling = Sampling(max_tokens=3, temperature=0.0)
    assert side.answer(ids, sampling) == sim_answer(ids, sampling, config)
    side.check_all_returned()


def test_an_answer_continues_from_the_tokens_a_client_has(side: Side) -> None:
    ids = prompt(9)
    whole = sim_answer(ids, SEEDED, SMALL)
    assert len(whole) == 8
    for kept in range(1, 8):
        assert sim_answer(ids, SEEDED, SMALL, generated=whole[:kept]) == whole[kept:]
        holding = side.take(len(ids) + kept)
        assert side.prefill(holding, ids + whole[:kept], SEEDED) == whole[kept]
        holding.release()


def test_the_reference_has_no_answer_to_nothing() -> None:
    with pytest.raises(ValueError, match="prompt_ids"):
        sim_answer([], GREEDY, SMALL)


def second_token(side: Side, holding: Holding, ids: Sequence[int], first: int) -> int:
    return side.step(holding, len(ids), [first], GREEDY)


def test_each_stored_byte_decides_the_next_token(side: Side) -> None:
    ids = prompt(6)
    holding = side.take(6)
    first = side.prefill(holding, ids, GREEDY)
    clean = [side.read(block) for block in holding.blocks]
    right = second_token(side, holding, ids, first)
    assert right == sim_answer(ids, GREEDY, SMALL)[1]
    flip = random.Random(3)
    wrong_answers = 0
    for i, block in enumerate(holding.blocks):
        for at in range(len(clean[i])):
            damaged = bytearray(clean[i])
            damaged[at] ^= 1 << flip.randrange(8)
            side.write(block, bytes(damaged))
            wrong_answers += second_token(side, holding, ids, first) != right
        side.write(block, clean[i])
    # Six prompt tokens have 96 bytes each; the seventh is written by the step, and the eighth slot
    # is not part of the context.
    assert wrong_answers == 6 * 96


@pytest.mark.parametrize("tokens", [12, 14])
def test_swapped_blocks_change_the_next_token(side: Side, tokens: int) -> None:
    ids = prompt(tokens)
    holding = side.take(tokens)
    first = side.prefill(holding, ids, GREEDY)
    right = second_token(side, holding, ids, first)
    for i in range(3):
        a, b = holding.blocks[i], holding.blocks[(i + 1) % 3]
        kept_a, kept_b = side.read(a), side.read(b)
        side.write(a, kept_b)
        side.write(b, kept_a)
        assert second_token(side, holding, ids, first) != right
        side.write(a, kept_a)
        side.write(b, kept_b)
    assert second_token(side, holding, ids, first) == right


def test_a_stale_block_changes_the_next_token(side: Side) -> None:
    ids, others = prompt(16, seed=1), prompt(16, seed=2)
    earlier = side.take(16)
    side.prefill(earlier, others, GREEDY)
    stale = [side.read(block) for block in earlier.blocks]
    holding = side.take(16)
    first = side.prefill(holding, ids, GREEDY)
    right = second_token(side, holding, ids, first)
    for i in range(4):
        kept = side.read(holding.blocks[i])
        for content in (stale[i], bytes(len(kept))):
            side.write(holding.blocks[i], content)
            assert second_token(side, holding, ids, first) != right
        side.write(holding.blocks[i], kept)


def test_a_layer_that_never_came_changes_the_next_token(side: Side) -> None:
    ids = prompt(10)
    holding = side.take(10)
    first = side.prefill(holding, ids, GREEDY)
    right = second_token(side, holding, ids, first)
    memory = side.engine.memory
    for layer in range(SMALL.sim_layers):
        slab = b"".join(memory.read(holding.blocks[:2], 0, layer, 1))
        memory.write(holding.blocks[:2], 0, layer, 1, memoryview(bytes(len(slab))))
        assert second_token(side, holding, ids, first) != right
        memory.write(holding.blocks[:2], 0, layer, 1, memoryview(slab))


def test_a_prompt_that_differs_only_at_its_start_has_other_kv_to_its_end(side: Side) -> None:
    a, b = prompt(12), prompt(12)
    b[0] ^= 1
    one, other = side.take(12), side.take(12)
    assert side.prefill(one, a, GREEDY) != side.prefill(other, b, GREEDY)
    assert side.read(one.blocks[-1]) != side.read(other.blocks[-1])


@pytest.mark.parametrize("length", [1, 4, 7, 16, 30])
def test_an_answer_goes_on_from_kv_that_was_moved_to_another_engine(length: int) -> None:
    p, d = Side(SMALL, shuffle=1), Side(SMALL, shuffle=2)
    ids = prompt(length)
    source, target = p.take(length), d.take(length)
    first = p.prefill(source, ids, SEEDED)
    for layer in range(SMALL.sim_layers):
        slab = b"".join(p.engine.memory.read(source.blocks, 0, layer, 1))
        d.engine.memory.write(target.blocks, 0, layer, 1, memoryview(slab))
    source.release()
    assert d.finish(target, length, first, SEEDED) == sim_answer(ids, SEEDED, SMALL)
    p.check_all_returned()
    d.check_all_returned()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [3, 2, 1, 0]])
def test_the_order_of_a_batch_changes_nothing(side: Side, order: list[int]) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 5, 8, 11)]
    holdings = [side.take(len(ids) + 1) for ids in prompts]
    chunks = [
        PrefillChunk(ids, 0, held.blocks, SampleSpec(SEEDED, len(ids), 0))
        for ids, held in zip(prompts, holdings, strict=True)
    ]
    firsts = side.engine.prefill([chunks[i] for i in order], no_callback)
    slots, expected = [], []
    for i, first in zip(order, firsts, strict=True):
        answer = sim_answer(prompts[i], SEEDED, SMALL)
        assert first is not None and first.token_id == answer[0]
        position = len(prompts[i])
        spec = SampleSpec(SEEDED, position + 1, 1)
        slots.append(DecodeSlot(answer[0], position, holdings[i].blocks, spec))
        expected.append(answer[1])
    assert [sampled.token_id for sampled in side.engine.decode(slots)] == expected


def test_an_empty_batch_does_nothing(side: Side) -> None:
    assert side.engine.decode([]) == []
    assert side.engine.prefill([], no_callback) == []


def test_how_fast_a_step_is_of_itself(record_property: Callable[[str, object], None]) -> None:
    """Reports, with `pytest -s` and in junit files; what it asserts is the answer."""
    config = EngineConfig(engine="sim")
    side = Side(config)
    ids = prompt(1300, vocab=config.sim_vocab)
    sampling = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    holding = side.take(len(ids))
    began = time.perf_counter()
    first = side.prefill(holding, ids, sampling, chunk=512)
    prefilled = time.perf_counter()
    output = side.finish(holding, len(ids), first, sampling)
    ended = time.perf_counter()
    prefill_us = (prefilled - began) / len(ids) * 1e6
    decode_us = (ended - prefilled) / (len(output) - 1) * 1e6
    record_property("prefill_us_per_token", prefill_us)
    record_property("decode_us_per_slot_at_1300", decode_us)
    print(f"\nsim: prefill {prefill_us:.1f} us/token, decode {decode_us:.0f} us/slot at 1300")
    assert output == sim_answer(ids, sampling, config)
    side.check_all_returned()
