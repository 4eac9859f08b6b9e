"""The sim engine: real bytes in a real pool, and no model.

Every token of output depends on every byte of KV that is stored for the tokens before it, so a
block that was lost, is stale or lies in the wrong place changes the answer. The rule below is all
there is to it; `sim_reference` follows it without a pool, and any other language can.

**Layout.** By default (`sim_layout` is `plain`) one FULL group of `sim_layers` layers, with planes
K and V of `uint8`, `sim_heads` heads of `sim_head_dim`. With `fp8-scale` they are of `float8_e4m3`,
and behind them comes a plane SCALE of `float32` with 2 elements for each head. With `sliding` a
second group follows, SLIDING with the window `sim_window`, of `sim_layers + 1` layers with planes K
and V of `bfloat16`, `2 * sim_heads` heads of `sim_head_dim`. `sliding-fp8-scale` has both. Bytes
are bytes here, whatever the dtype says. LE32 and LE64 below are little-endian unsigned integers,
F32 is a little-endian IEEE 754 single, `||` joins bytes.

**Chain.** `h[-1]` is 16 zero bytes, and for the token at position i

    h[i] = first 16 bytes of SHA-256( h[i-1] || LE32(token[i]) )

**KV of a token.** With n bytes per token, over all groups, layers and planes,

    kv[i] = h[i] || first n - 16 bytes of SHAKE-128( h[i] )

laid out group -> layer -> plane -> head -> dimension. So plane K of layer 0 begins with `h[i]`,
which is why it must have room for 16 bytes, and the engine takes `h[i-1]` from the pool, never from
a variable: whoever holds the KV can go on.

**Next token.** The token at position n, n >= 1, follows from the stored KV of tokens 0 to n-1; of a
SLIDING group with window w, from that of the last w of them alone. Let `c` be the CRC-32C of these
bytes: group after group, in each block after block in logical order, each block in the canonical
order (layer -> plane -> head -> token -> dimension); of a block of which not all tokens count only
those that do, in the same order. Then

    digest = SHA-256( LE32(c) || LE64(n) )                                       when greedy
    digest = SHA-256( LE32(c) || LE64(n) || LE64(seed)
                      || F32(temperature) || F32(top_p) || LE64(top_k) )         otherwise
    token  = LE64(first 8 bytes of digest) mod sim_vocab

Greedy means temperature 0 or top_k 1. While fewer than `min_tokens` tokens of output come before it
and the token is 2 (end of sequence) or one of `stop_token_ids`, `digest` becomes SHA-256(digest)
and the token is taken again.

The engine keeps nothing of a request between two steps.

**Format.** With `sim_format` token-major the pool holds each layer of a block as token -> plane ->
head -> dimension, and the layout's `format` is `sim-token-major`. The rule is the same: `c` is
taken of the canonical bytes.

**Ranks.** With `tp` or `pp` above 1 the KV lies in `tp * pp` memories, each with its own layers and
heads, and the rule is applied to what they hold together: the answer is that of one rank. Where
several ranks hold the same heads, `c` is worked out once with the bytes of each; if it is not the
same every time it becomes the CRC-32C of all of them, so that a wrong byte on any rank changes the
answer.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np

from pd_grpc.engine.base import (
    DecodeSlot,
    Engine,
    EngineFault,
    EngineShard,
    KvMemory,
    PrefillChunk,
    Sampled,
    SampleSpec,
)
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.pool_buffer import PoolBuffer
from pd_grpc.engine.sim_layouts import CHAIN_BYTES, sim_layout
from pd_grpc.engine.sim_pool import Bytes, Indices, SimGroup
from pd_grpc.engine.sim_ranks import SimRanks
from pd_grpc.engine.sim_tokenizer import EOS_ID, SimTokenizer
from pd_grpc.engine.step_table import INVENTED_STEPS, StepTable
from pd_grpc.engine.token_major import TokenMajorMemory
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.layout import CANONICAL
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.protocol.shards import cut

SIM_MODEL_LEN = 1 << 20
"""The sim model's own limit: a prompt of a million tokens and some output."""
MAX_VOCAB = 1 << 32
"""A token id is a uint32."""

_CHAIN_START = bytes(CHAIN_BYTES)


@dataclass(frozen=True)
class _Span:
    """A chunk on its way into the pool: its KV, a token in each row, and for each token the
    physical block and the slot in it."""

    kv: Bytes
    blocks: Indices
    slots: Indices


class SimEngine(Engine):
    """The rule of this module over a pool in host memory.

    A step takes its own time, about 5 us a token of prefill and 0.1 ms a slot of decode, and on top
    `sim_time_scale` times what `steps` says, slept through `sleep`; of a prefill step an equal part
    before each layer is reported, so that sending overlaps it as it would overlap compute. A step
    of both takes what `steps` says of one pass: prefill its own time, and then decode the rest.
    """

    def __init__(
        self,
        config: EngineConfig,
        sleep: Callable[[float], None] = time.sleep,
        steps: StepTable = INVENTED_STEPS,
    ) -> None:
        """Takes `num_blocks * block_bytes` bytes of memory. ValueError naming the field of `config`
        that the sim model cannot do."""
        if config.sim_vocab > MAX_VOCAB:
            raise ValueError(f"sim_vocab: {config.sim_vocab} is above {MAX_VOCAB}")
        if config.max_model_len > SIM_MODEL_LEN:
            raise ValueError(
                f"max_model_len: {config.max_model_len} is above the sim model's {SIM_MODEL_LEN}"
            )
        self.name = "sim"
        self.layout = sim_layout(config)
        self.vocab_size = config.sim_vocab
        self.max_model_len = config.max_model_len or SIM_MODEL_LEN
        self.eos_token_ids = frozenset({EOS_ID})
        self.features = frozenset()
        size = config.num_blocks * self.layout.block_bytes
        self._buffer = PoolBuffer(size, config.shares_pool)
        stored = HostKvMemory(self._buffer.view, self.layout, self._buffer.fd)
        self.memory: KvMemory = stored
        if self.layout.format != CANONICAL:
            self.memory = TokenMajorMemory(stored, self.layout)
        pool = np.frombuffer(self._buffer.view, np.uint8).reshape(config.num_blocks, -1)
        groups = range(len(self.layout.groups))
        self._groups = [SimGroup(pool, self.layout, group) for group in groups]
        self._ranks: SimRanks | None = None
        if config.tp * config.pp > 1:
            self._ranks = SimRanks(self.layout, cut(self.layout, config.tp, config.pp), pool)
            self.memory = self._ranks.shards[0].memory
        self._tokenizer = SimTokenizer(config.sim_vocab)
        self._sleep = sleep
        self._steps = steps
        self._time_scale = config.sim_time_scale
        self._spared_ms = 0.0
        """What the step that runs takes less than its prefill and its decode apart."""

    @property
    def shards(self) -> tuple[EngineShard, ...]:
        return super().shards if self._ranks is None else self._ranks.shards

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        tables = [
            self._table(c.block_table, c.token_ids, c.start, c.start + len(c.token_ids), c.sample)
            for c in batch
        ]
        spans = [self._span(c, table) for c, table in zip(batch, tables, strict=True)]
        step_ms = self._steps.prefill_ms(sum(len(chunk.token_ids) for chunk in batch))
        layers = sum(group.layers for group in self._groups)
        for g, group in enumerate(self._groups):
            for layer in range(group.layers):
                self._pass(step_ms / layers)
                for span in spans:
                    group.store_layer(layer, span.blocks, span.slots, span.kv)
                    self._push(span.blocks, g, layer)
                on_layer(g, layer)
        return [
            self._choose(table, chunk.sample) if chunk.sample is not None else None
            for chunk, table in zip(batch, tables, strict=True)
        ]

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Sampled]:
        tables = [
            self._table(s.block_table, (s.token_id,), s.position, s.position + 1, s.sample)
            for s in batch
        ]
        for slot, table in zip(batch, tables, strict=True):
            block, at = divmod(slot.position, self.layout.block_size)
            kv = self._chain_kv((slot.token_id,), slot.position, table)
            for g, group in enumerate(self._groups):
                group.store_token(table[block], at, kv[0])
                for layer in range(group.layers):
                    self._push(table[block : block + 1], g, layer)
        # The time passes before the KV is read again, which gives a writer that should have stopped
        # the chance to be noticed.
        self._pass(self._decode_ms(batch) - self._spared_ms)
        return [self._choose(table, slot.sample) for slot, table in zip(batch, tables, strict=True)]

    def step(
        self,
        chunks: Sequence[PrefillChunk],
        slots: Sequence[DecodeSlot],
        on_layer: Callable[[int, int], None],
    ) -> tuple[list[Sampled | None], list[Sampled]]:
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        context = sum(slot.position for slot in slots)
        apart_ms = self._steps.prefill_ms(tokens) + self._decode_ms(slots)
        self._spared_ms = apart_ms - self._steps.mixed_ms(tokens, len(slots), context)
        try:
            return super().step(chunks, slots, on_layer)
        finally:
            self._spared_ms = 0.0

    def tokenizer(self) -> SimTokenizer:
        return self._tokenizer

    def close(self) -> None:
        self._buffer.close()

    def _decode_ms(self, batch: Sequence[DecodeSlot]) -> float:
        return self._steps.decode_ms(len(batch), sum(slot.position for slot in batch))

    def _pass(self, ms: float) -> None:
        if self._time_scale > 0 and ms > 0:
            self._sleep(ms / 1000 * self._time_scale)

    def _table(
        self,
        block_table: Sequence[int],
        token_ids: Sequence[int],
        start: int,
        tokens: int,
        sample: SampleSpec | None,
    ) -> Indices:
        """The blocks of the first `tokens` tokens; EngineFault when a part of the batch is wrong,
        before anything is written."""
        needed = self.layout.blocks_for(tokens)
        if len(token_ids) == 0 or start < 0 or needed > len(block_table):
            raise EngineFault(
                f"{len(token_ids)} tokens from position {start} on in {len(block_table)} blocks of "
                f"{self.layout.block_size}"
            )
        table = np.asarray(block_table[:needed], dtype=np.intp)
        if table.min() < 0 or table.max() >= self.memory.num_blocks:
            raise EngineFault(f"a block is outside the pool of {self.memory.num_blocks}")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise EngineFault(f"a token id is outside the vocabulary of {self.vocab_size}")
        if sample is not None and sample.position != tokens:
            raise EngineFault(f"the token after {tokens} tokens is not at {sample.position}")
        return table

    def _span(self, chunk: PrefillChunk, table: Indices) -> _Span:
        positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.intp)
        blocks, slots = np.divmod(positions, self.layout.block_size)
        kv = self._chain_kv(chunk.token_ids, chunk.start, table)
        return _Span(kv, table[blocks], slots)

    def _chain_kv(self, token_ids: Sequence[int], start: int, table: Indices) -> Bytes:
        """KV of tokens that follow the one stored at `start - 1`, a token in each row."""
        chain = self._stored_chain(table, start - 1) if start else _CHAIN_START
        rest = self.layout.token_bytes - CHAIN_BYTES
        parts = []
        for token_id in token_ids:
            link = chain + token_id.to_bytes(4, "little")
            chain = hashlib.sha256(link).digest()[:CHAIN_BYTES]
            parts.append(chain)
            parts.append(hashlib.shake_128(chain).digest(rest))
        return np.frombuffer(b"".join(parts), np.uint8).reshape(len(token_ids), -1)

    def _stored_chain(self, table: Indices, position: int) -> bytes:
        block, slot = divmod(position, self.layout.block_size)
        self._pull(table[block : block + 1])
        return self._groups[0].first_bytes(table[block], slot)[:CHAIN_BYTES]

    def _pull(self, blocks: Indices, replica: int = 0) -> None:
        if self._ranks is not None:
            self._ranks.pull(blocks, replica)

    def _push(self, blocks: Indices, group: int, layer: int) -> None:
        if self._ranks is not None:
            self._ranks.push(np.unique(blocks), group, layer)

    def _choose(self, table: Indices, spec: SampleSpec) -> Sampled:
        s = spec.sampling
        digest = _mix(self._stored_checksum(table, spec.position), spec.position, s)
        token_id = _token(digest, self.vocab_size)
        if spec.generated < s.min_tokens:
            while token_id == EOS_ID or token_id in s.stop_token_ids:
                digest = hashlib.sha256(digest).digest()
                token_id = _token(digest, self.vocab_size)
        return Sampled(token_id)

    def _stored_checksum(self, table: Indices, tokens: int) -> int:
        """Of what the ranks hold, every one of them."""
        found = []
        for replica in range(1 if self._ranks is None else self._ranks.replicas):
            self._pull(table, replica)
            found.append(self._checksum(table, tokens))
        if found.count(found[0]) == len(found):
            return found[0]
        crc: int = google_crc32c.value(struct.pack(f"<{len(found)}I", *found))
        return crc

    def _checksum(self, table: Indices, tokens: int) -> int:
        """CRC-32C of the KV that attention sees at the first `tokens` tokens."""
        crc = 0
        for group in self._groups:
            crc = group.checksum(crc, table, tokens)
        return crc


def _mix(crc: int, position: int, s: Sampling) -> bytes:
    message = struct.pack("<IQ", crc, position)
    if not (s.greedy or s.top_k == 1):
        message += struct.pack("<QffQ", s.seed, s.temperature, s.top_p, s.top_k)
    return hashlib.sha256(message).digest()


def _token(digest: bytes, vocab_size: int) -> int:
    return int.from_bytes(digest[:8], "little") % vocab_size
