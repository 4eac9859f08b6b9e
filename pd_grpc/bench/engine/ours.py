"""A case on our engine, as the servers run it: chunks of prompts, then batched decode steps."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

from pd_grpc.bench.engine.cases import SEED, Case, Timed
from pd_grpc.blocks.pool import blocks_for
from pd_grpc.engine.base import DecodeSlot, Engine, PrefillChunk, Sampled, SampleSpec
from pd_grpc.engine.chunks import ChunkShares, Left, cut_of
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling


def run_ours(engine: Engine, case: Case, config: EngineConfig) -> Timed:
    """Greedily; past an end of sequence, for nothing here ends a request but its length. The blocks
    of each prompt lie anywhere in the pool, as in one that has been in use; `config` says how much
    of the prompts a step has."""
    prompts = case.prompts(engine.vocab_size)
    sampling = Sampling(max_tokens=case.new_tokens, temperature=0.0, ignore_eos=True)
    tables = _tables(engine, case)
    outputs: list[list[int]] = [[] for _ in prompts]
    began = time.perf_counter()
    for batch in _batches(prompts, config):
        chunks = [
            PrefillChunk(
                prompts[i][start:end],
                start,
                tables[i],
                SampleSpec(sampling, end, 0) if end == len(prompts[i]) else None,
            )
            for i, start, end in batch
        ]
        for (i, _, _), sampled in zip(batch, engine.prefill(chunks, _no_layer), strict=True):
            if sampled is not None:
                outputs[i].append(sampled.token_id)
    prefilled = time.perf_counter()
    for _ in range(case.steps):
        slots = [
            DecodeSlot(
                output[-1],
                len(prompt) + len(output) - 1,
                table,
                SampleSpec(sampling, len(prompt) + len(output), len(output)),
            )
            for prompt, output, table in zip(prompts, outputs, tables, strict=True)
        ]
        found: Sequence[Sampled] = engine.decode(slots)
        for output, sampled in zip(outputs, found, strict=True):
            output.append(sampled.token_id)
    return Timed(prefilled - began, time.perf_counter() - prefilled, outputs)


def blocks_of(case: Case, block_size: int) -> int:
    """How many a pool needs for a case."""
    return sum(blocks_for(length + case.new_tokens, block_size) for length in case.lengths)


def _tables(engine: Engine, case: Case) -> list[list[int]]:
    free = list(range(engine.memory.num_blocks))
    random.Random(SEED).shuffle(free)
    tables = []
    for length in case.lengths:
        blocks = engine.layout.blocks_for(length + case.new_tokens)
        tables.append(free[:blocks])
        del free[:blocks]
    return tables


def _batches(
    prompts: Sequence[Sequence[int]], config: EngineConfig
) -> Iterator[list[tuple[int, int, int]]]:
    """(prompt, start, end) of the chunks of each step, as the schedulers deal them out."""
    shares = ChunkShares(cut_of(config), config.prefill_batch)
    done = [0] * len(prompts)
    while waiting := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
        left = [Left(done[i], len(prompts[i]) - done[i]) for i in waiting]
        dealt = shares.deal(left, config.chunk_tokens)
        batch = [(i, done[i], done[i] + n) for i, n in zip(waiting, dealt, strict=True) if n]
        for i, _, end in batch:
            done[i] = end
        yield batch


def _no_layer(group: int, layer: int) -> None:
    pass
