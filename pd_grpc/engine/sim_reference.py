"""What the sim model must answer, worked out from its rule without a pool or an engine.

Written from the docstring of `sim` alone and in plain Python, so that an error in the engine's
array arithmetic, or anywhere on the way of the KV, does not repeat here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import google_crc32c

from pd_grpc.engine.sim_layouts import sim_layout
from pd_grpc.engine.sim_tokenizer import EOS_ID, SimTokenizer
from pd_grpc.engine.stopping import StopRule
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.layout import DTYPE_BYTES, KvGroup
from pd_grpc.protocol.sampling import Sampling


def sim_answer(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    config: EngineConfig,
    generated: Sequence[int] = (),
) -> list[int]:
    """The output tokens of a request, with the one that ends it, after those of `generated`.

    Of `config` only `block_size` and the `sim_*` shape matter. ValueError for an empty prompt.
    """
    if not prompt_ids:
        raise ValueError("prompt_ids: a prompt has at least one token")
    kv = SimKv(config)
    for token_id in (*prompt_ids, *generated):
        kv.append(token_id)
    rule = StopRule(sampling, {EOS_ID}, SimTokenizer(config.sim_vocab), generated)
    answer: list[int] = []
    while True:
        token_id = _next_token(kv, sampling, config.sim_vocab, len(generated) + len(answer))
        answer.append(token_id)
        if rule.push(token_id) is not None:
            return answer
        kv.append(token_id)


class SimKv:
    """The KV of one sequence, as blocks in the canonical order would hold it."""

    def __init__(self, config: EngineConfig) -> None:
        layout = sim_layout(config)
        self._token_bytes = layout.token_bytes
        self._groups = []
        start = 0
        for group in layout.groups:
            self._groups.append(_GroupKv(group, layout.block_size, start))
            start += group.layers * group.token_bytes
        self._chain = b"\0" * 16
        self.tokens = 0

    def append(self, token_id: int) -> bytes:
        """Add the next token; returns its KV, group -> layer -> plane -> head -> dimension."""
        self._chain = hashlib.sha256(self._chain + struct.pack("<I", token_id)).digest()[:16]
        kv = self._chain + hashlib.shake_128(self._chain).digest(self._token_bytes - 16)
        for group in self._groups:
            group.append(kv)
        self.tokens += 1
        return kv

    def last_block(self) -> bytes:
        """The block of the last token, canonical, without room for the tokens that it lacks."""
        return b"".join(group.last_block() for group in self._groups)

    def crc(self) -> int:
        """CRC-32C of all that the next token depends on."""
        crc = 0
        for group in self._groups:
            crc = group.crc(crc)
        return crc


class _GroupKv:
    """One group's part of it: the tokens that count, in blocks, and those of the last block."""

    def __init__(self, group: KvGroup, block_size: int, start: int) -> None:
        self._block_size = block_size
        self._window = group.window
        self._rows = []
        """Where the bytes of each layer, plane and head lie in a token's KV."""
        for _layer in range(group.layers):
            for plane in group.planes:
                for _head in range(plane.heads):
                    size = plane.head_dim * DTYPE_BYTES[plane.dtype]
                    self._rows.append((start, start + size))
                    start += size
        self._blocks: list[list[bytes]] = []
        self._before = 0
        """CRC-32C of the blocks before these, in a group without a window."""

    def append(self, kv: bytes) -> None:
        if not self._blocks or len(self._blocks[-1]) == self._block_size:
            if self._window:
                kept = -(-self._window // self._block_size)
                self._blocks = self._blocks[-kept:]
            else:
                self._before = self.crc(0)
                self._blocks = []
            self._blocks.append([])
        self._blocks[-1].append(kv)

    def last_block(self) -> bytes:
        return self._canonical(self._blocks[-1])

    def crc(self, crc: int) -> int:
        blocks = [list(block) for block in self._blocks]
        unseen = sum(map(len, blocks)) - self._window if self._window else 0
        for block in blocks:
            out_of_sight = min(max(0, unseen), len(block))
            del block[:out_of_sight]
            unseen -= out_of_sight
        if self._before:
            assert crc == 0, "a group without a window is the first"
            crc = self._before
        for block in blocks:
            crc = google_crc32c.extend(crc, self._canonical(block))
        return crc

    def _canonical(self, tokens: Sequence[bytes]) -> bytes:
        return b"".join(kv[first:end] for first, end in self._rows for kv in tokens)


def _next_token(kv: SimKv, sampling: Sampling, vocab: int, output_before: int) -> int:
    message = struct.pack("<I", kv.crc()) + struct.pack("<Q", kv.tokens)
    if sampling.temperature != 0 and sampling.top_k != 1:
        message += struct.pack("<Q", sampling.seed)
        message += struct.pack("<f", sampling.temperature) + struct.pack("<f", sampling.top_p)
        message += struct.pack("<Q", sampling.top_k)
    barred = {EOS_ID, *sampling.stop_token_ids} if output_before < sampling.min_tokens else set()
    while True:
        message = hashlib.sha256(message).digest()
        (drawn,) = struct.unpack("<Q", message[:8])
        if drawn % vocab not in barred:
            return int(drawn % vocab)
