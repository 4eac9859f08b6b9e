"""What the sim model must answer, worked out from its rule without a pool or an engine.

Written from the docstring of `sim` alone and in plain Python, so that an error in the engine's
array arithmetic, or anywhere on the way of the KV, does not repeat here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import google_crc32c

from pd_grpc.engine.sim_tokenizer import EOS_ID, SimTokenizer
from pd_grpc.engine.stopping import StopRule
from pd_grpc.protocol.config import EngineConfig
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
        self._block_size = config.block_size
        self._row_bytes = config.sim_head_dim
        self._token_bytes = config.sim_layers * 2 * config.sim_heads * config.sim_head_dim
        self._chain = b"\0" * 16
        self._full_blocks_crc = 0
        self._block: list[bytes] = []
        self.tokens = 0

    def append(self, token_id: int) -> bytes:
        """Add the next token; returns its KV, layer -> plane -> head -> dimension."""
        self._chain = hashlib.sha256(self._chain + struct.pack("<I", token_id)).digest()[:16]
        more = hashlib.shake_128(self._chain).digest(self._token_bytes - 16)
        if len(self._block) == self._block_size:
            self._full_blocks_crc = self.crc()
            self._block = []
        self._block.append(self._chain + more)
        self.tokens += 1
        return self._block[-1]

    def last_block(self) -> bytes:
        """The block of the last token, canonical, without room for the tokens that it lacks."""
        rows = range(0, self._token_bytes, self._row_bytes)
        return b"".join(kv[row : row + self._row_bytes] for row in rows for kv in self._block)

    def crc(self) -> int:
        """CRC-32C of all blocks so far."""
        crc: int = google_crc32c.extend(self._full_blocks_crc, self.last_block())
        return crc


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
