"""KV whose every byte says whose it is, and an engine that reads it.

The KV of a token is a tag: which transfer and attempt wrote it, at which position, for which token.
The next token depends on all tags before it, so that a block that was lost, misplaced or written by
another shows in the answer, and is noticed before that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.prefill.validation import ModelLimits
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.refs import TransferKey

BLOCK = 2
"""Tokens of a block."""

VOCAB = 300
EOS = 2
MAX_MODEL_LEN = 64
TOKENIZER = SimTokenizer(VOCAB)

LAYOUT = KvLayout(
    model="explored",
    positions="none",
    block_size=BLOCK,
    groups=(
        KvGroup(
            GroupKind.FULL,
            1,
            (Plane(PlaneKind.K, "uint8", 1, 4), Plane(PlaneKind.V, "uint8", 1, 4)),
        ),
    ),
)

_TAG = struct.Struct(">BBHI")
BLOCK_BYTES = _TAG.size * BLOCK


class Tag(NamedTuple):
    """The KV of one token. `transfer` is the number in the transfer's id, 0 for nobody's."""

    transfer: int
    attempt: int
    position: int
    token: int


class WrongKv(Exception):
    """KV was read that is not what the reader must find there; the text says what."""


def number_of(key: TransferKey) -> int:
    """The number in a transfer's id: 3 of `t3`."""
    return int(key.transfer_id.lstrip("t"))


def next_token(tokens: Sequence[int]) -> int:
    """The token that follows; never EOS."""
    return 10 + (sum((i + 1) * token for i, token in enumerate(tokens)) * 7 + len(tokens)) % 200


def answer_to(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The right answer to a prompt."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def limits(num_blocks: int) -> ModelLimits:
    """What a P with this engine takes."""
    return ModelLimits(LAYOUT, VOCAB, MAX_MODEL_LEN, num_blocks, frozenset(), frozenset({EOS}))


class TagMemory:
    """The memory of a pool: KvMemory, block by block."""

    def __init__(self, num_blocks: int, shared: bool = False) -> None:
        """`shared` KV may be read by another transfer than wrote it, for equal tokens."""
        self.cells: list[bytes] = [bytes(BLOCK_BYTES)] * num_blocks
        self.shared = shared

    @property
    def shared_fd(self) -> None:
        """Nobody else writes to it."""

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.cells)

    def read(self, blocks: Sequence[int], group: int, layer: int, layers: int) -> list[memoryview]:
        """See `KvMemory.read`."""
        return [memoryview(self.cells[block]) for block in blocks]

    def write(
        self, blocks: Sequence[int], group: int, layer: int, layers: int, payload: memoryview
    ) -> None:
        """See `KvMemory.write`."""
        for i, block in enumerate(blocks):
            self.cells[block] = bytes(payload[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])

    # --- the engine ------------------------------------------------------------------------------

    def store(self, table: Sequence[int], tag: Tag) -> None:
        """Write the KV of one token."""
        block, place = table[tag.position // BLOCK], tag.position % BLOCK * _TAG.size
        cell = bytearray(self.cells[block])
        cell[place : place + _TAG.size] = _TAG.pack(*tag)
        self.cells[block] = bytes(cell)

    def tag(self, table: Sequence[int], position: int) -> Tag:
        """What lies where the KV of one position must lie."""
        block, place = table[position // BLOCK], position % BLOCK * _TAG.size
        return Tag(*_TAG.unpack_from(self.cells[block], place))

    def tokens(self, table: Sequence[int], count: int, key: TransferKey) -> list[int]:
        """The first `count` tokens of a transfer as its KV has them. WrongKv where it is not all
        that transfer's own, or where it is shared that of nobody at this position."""
        found = []
        for position in range(count):
            tag = self.tag(table, position)
            own = (tag.transfer, tag.attempt) == (number_of(key), key.attempt)
            if tag.position != position or not (own or (self.shared and tag.transfer)):
                raise WrongKv(f"{key} reads {tag} at position {position}")
            found.append(tag.token)
        return found
