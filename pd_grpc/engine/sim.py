"""The sim engine: real bytes in a real pool, and no model.

Every token of output depends on every byte of KV that is stored for the tokens before it, so a
block that was lost, is stale or lies in the wrong place changes the answer. The rule below is all
there is to it; `sim_reference` follows it without a pool, and any other language can.

**Layout.** One FULL group of `sim_layers` layers; planes K and V of `uint8`, `sim_heads` heads of
`sim_head_dim`; blocks in the canonical order. LE32 and LE64 below are little-endian unsigned
integers, F32 is a little-endian IEEE 754 single, `||` joins bytes.

**Chain.** `h[-1]` is 16 zero bytes, and for the token at position i

    h[i] = first 16 bytes of SHA-256( h[i-1] || LE32(token[i]) )

**KV of a token.** With `n = sim_layers * 2 * sim_heads * sim_head_dim` bytes per token,

    kv[i] = h[i] || first n - 16 bytes of SHAKE-128( h[i] )

laid out layer -> plane -> head -> dimension. So plane K of layer 0 begins with `h[i]`, which is why
it must have room for 16 bytes, and the engine takes `h[i-1]` from the pool, never from a variable:
whoever holds the KV can go on.

**Next token.** The token at position n, n >= 1, follows from the stored KV of tokens 0 to n-1. Let
`c` be the CRC-32C of these bytes, block after block in logical order, each in the canonical order
(layer -> plane -> head -> token -> dimension); of a last block that is not full only the tokens it
has count, in the same order. Then

    digest = SHA-256( LE32(c) || LE64(n) )                                       when greedy
    digest = SHA-256( LE32(c) || LE64(n) || LE64(seed)
                      || F32(temperature) || F32(top_p) || LE64(top_k) )         otherwise
    token  = LE64(first 8 bytes of digest) mod sim_vocab

Greedy means temperature 0 or top_k 1. While fewer than `min_tokens` tokens of output come before it
and the token is 2 (end of sequence) or one of `stop_token_ids`, `digest` becomes SHA-256(digest)
and the token is taken again.

The engine keeps nothing of a request between two steps.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from pd_grpc.engine.base import (
    DecodeSlot,
    Engine,
    EngineFault,
    PrefillChunk,
    Sampled,
    SampleSpec,
)
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.pool_buffer import PoolBuffer
from pd_grpc.engine.sim_tokenizer import EOS_ID, SimTokenizer
from pd_grpc.engine.step_table import INVENTED_STEPS, StepTable
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.sampling import Sampling

CHAIN_BYTES = 16
SIM_MODEL_LEN = 1 << 20
"""The sim model's own limit: a prompt of a million tokens and some output."""
MAX_VOCAB = 1 << 32
"""A token id is a uint32."""

_CHAIN_START = bytes(CHAIN_BYTES)
_CHECKSUM_BLOCKS = 1024
"""Blocks copied together for a checksum; bounds the copy of a long context."""

_Bytes = npt.NDArray[np.uint8]
_Indices = npt.NDArray[np.intp]


def sim_layout(config: EngineConfig) -> KvLayout:
    """The layout of the sim model; ValueError when layer 0 has no room for the chain."""
    if config.sim_heads * config.sim_head_dim < CHAIN_BYTES:
        raise ValueError(
            f"sim_head_dim: sim_heads * sim_head_dim is {config.sim_heads * config.sim_head_dim}, "
            f"it takes {CHAIN_BYTES} at least"
        )
    planes = tuple(
        Plane(kind, "uint8", config.sim_heads, config.sim_head_dim)
        for kind in (PlaneKind.K, PlaneKind.V)
    )
    return KvLayout(
        model=f"sim-v1/vocab={config.sim_vocab}",
        positions="sim",
        block_size=config.block_size,
        groups=(KvGroup(GroupKind.FULL, config.sim_layers, planes),),
    )


@dataclass(frozen=True)
class _Span:
    """A chunk on its way into the pool: its KV `(tokens, layers, planes, heads, dims)`, and for
    each token the physical block and the slot in it."""

    kv: _Bytes
    blocks: _Indices
    slots: _Indices


class SimEngine(Engine):
    """The rule of this module over a pool in host memory.

    A step takes its own time, about 5 us a token of prefill and 0.1 ms a slot of decode, and on top
    `sim_time_scale` times what `steps` says, slept through `sleep`; of a prefill step an equal part
    before each layer is reported, so that sending overlaps it as it would overlap compute.
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
        self.memory = HostKvMemory(self._buffer.view, self.layout, self._buffer.fd)
        whole = np.frombuffer(self._buffer.view, np.uint8)
        self._blocks: _Bytes = whole.reshape(config.num_blocks, -1)
        self._kv = self._blocks.reshape(
            config.num_blocks,
            config.sim_layers,
            2,
            config.sim_heads,
            config.block_size,
            config.sim_head_dim,
        )
        self._layers = config.sim_layers
        self._tokenizer = SimTokenizer(config.sim_vocab)
        self._sleep = sleep
        self._steps = steps
        self._time_scale = config.sim_time_scale

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        tables = [
            self._table(c.block_table, c.token_ids, c.start, c.start + len(c.token_ids), c.sample)
            for c in batch
        ]
        spans = [self._span(c, table) for c, table in zip(batch, tables, strict=True)]
        step_ms = self._steps.prefill_ms(sum(len(chunk.token_ids) for chunk in batch))
        for layer in range(self._layers):
            self._pass(step_ms / self._layers)
            for span in spans:
                self._kv[span.blocks, layer, :, :, span.slots] = span.kv[:, layer]
            on_layer(0, layer)
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
            self._kv[table[block], :, :, :, at] = kv[0]
        # The time passes before the KV is read again, which gives a writer that should have stopped
        # the chance to be noticed.
        self._pass(self._steps.decode_ms(len(batch), sum(slot.position for slot in batch)))
        return [self._choose(table, slot.sample) for slot, table in zip(batch, tables, strict=True)]

    def tokenizer(self) -> SimTokenizer:
        return self._tokenizer

    def close(self) -> None:
        self._buffer.close()

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
    ) -> _Indices:
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

    def _span(self, chunk: PrefillChunk, table: _Indices) -> _Span:
        positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.intp)
        blocks, slots = np.divmod(positions, self.layout.block_size)
        kv = self._chain_kv(chunk.token_ids, chunk.start, table)
        return _Span(kv, table[blocks], slots)

    def _chain_kv(self, token_ids: Sequence[int], start: int, table: _Indices) -> _Bytes:
        """KV of tokens that follow the one stored at `start - 1`, `(tokens, layers, planes, heads,
        dims)`."""
        chain = self._stored_chain(table, start - 1) if start else _CHAIN_START
        rest = self.layout.token_bytes - CHAIN_BYTES
        parts = []
        for token_id in token_ids:
            link = chain + token_id.to_bytes(4, "little")
            chain = hashlib.sha256(link).digest()[:CHAIN_BYTES]
            parts.append(chain)
            parts.append(hashlib.shake_128(chain).digest(rest))
        kv: _Bytes = np.frombuffer(b"".join(parts), np.uint8)
        _, layers, planes, heads, _, dims = self._kv.shape
        return kv.reshape(len(token_ids), layers, planes, heads, dims)

    def _stored_chain(self, table: _Indices, position: int) -> bytes:
        block, slot = divmod(position, self.layout.block_size)
        return self._kv[table[block], 0, 0, :, slot].tobytes()[:CHAIN_BYTES]

    def _choose(self, table: _Indices, spec: SampleSpec) -> Sampled:
        s = spec.sampling
        digest = _mix(self._checksum(table, spec.position), spec.position, s)
        token_id = _token(digest, self.vocab_size)
        if spec.generated < s.min_tokens:
            while token_id == EOS_ID or token_id in s.stop_token_ids:
                digest = hashlib.sha256(digest).digest()
                token_id = _token(digest, self.vocab_size)
        return Sampled(token_id)

    def _checksum(self, table: _Indices, tokens: int) -> int:
        """CRC-32C of the KV stored for the first `tokens` tokens."""
        full, rest = divmod(tokens, self.layout.block_size)
        crc = 0
        for first in range(0, full, _CHECKSUM_BLOCKS):
            some = table[first : min(first + _CHECKSUM_BLOCKS, full)]
            crc = google_crc32c.extend(crc, self._blocks.take(some, axis=0))
        if rest:
            crc = google_crc32c.extend(crc, self._kv[table[full], :, :, :, :rest].tobytes())
        return crc


def _mix(crc: int, position: int, s: Sampling) -> bytes:
    message = struct.pack("<IQ", crc, position)
    if not (s.greedy or s.top_k == 1):
        message += struct.pack("<QffQ", s.seed, s.temperature, s.top_p, s.top_k)
    return hashlib.sha256(message).digest()


def _token(digest: bytes, vocab_size: int) -> int:
    return int.from_bytes(digest[:8], "little") % vocab_size
