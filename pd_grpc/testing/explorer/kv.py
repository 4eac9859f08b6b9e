"""KV whose every byte says whose it is, and an engine that reads it.

The KV of a token is a tag: which transfer and attempt wrote it, at which position, for which token.
The next token depends on all tags before it, so that a block that was lost, misplaced or written by
another shows in the answer, and is noticed before that.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

from pd_grpc.engine.base import Sampled
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.prefill.validation import ModelLimits
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.shards import Place, cut

BLOCK = 2
"""Tokens of a block."""

LOCAL = 100
"""Added to the number of a request whose KV D computes itself."""

VOCAB = 300
EOS = 2
MAX_MODEL_LEN = 64
TOKENIZER = SimTokenizer(VOCAB)


def layout_of(heads: int) -> KvLayout:
    """A model with one layer."""
    planes = (Plane(PlaneKind.K, "uint8", heads, 4), Plane(PlaneKind.V, "uint8", heads, 4))
    group = KvGroup(GroupKind.FULL, 1, planes)
    return KvLayout("explored", "none", BLOCK, (group,))


LAYOUT = layout_of(1)

_TAG = struct.Struct(">BBHI")
BLOCK_BYTES = _TAG.size * BLOCK


class Cut(NamedTuple):
    """Into how many shards an instance cuts the heads of its model."""

    heads: int = 1
    shards: int = 1

    @property
    def layout(self) -> KvLayout:
        """Of the whole model."""
        return layout_of(self.heads)

    @property
    def places(self) -> tuple[Place, ...]:
        """Of each shard."""
        return cut(self.layout, self.shards, 1)


UNCUT = Cut()


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


def writer_of(key: TransferKey) -> tuple[int, int]:
    """Transfer and attempt in the tags of a request. D names the second attempt of one that it
    prefills itself `local-t3#2-1`, and its KV is that of transfer 103."""
    local, _, asked = key.transfer_id.partition("local-")
    if local or not asked:
        return number_of(key), key.attempt
    number, attempt, _ = re.split("[#-]", asked)
    return LOCAL + int(number.lstrip("t")), int(attempt)


def client_of(key: TransferKey) -> str:
    """Whose request it is: `c3` for `t3`."""
    return f"c{writer_of(key)[0] % LOCAL}"


def next_token(tokens: Sequence[int]) -> int:
    """The token that follows; never EOS."""
    return 10 + (sum((i + 1) * token for i, token in enumerate(tokens)) * 7 + len(tokens)) % 200


def sampled(tokens: Sequence[int], spoiled: bool = False) -> Sampled:
    """What the engine says of a row with the KV of these tokens."""
    if spoiled:
        return Sampled(0, fault="no numbers", not_finite=True)
    return Sampled(next_token(tokens))


def answer_to(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The right answer to a prompt."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def limits(num_blocks: int, of: Cut = UNCUT) -> ModelLimits:
    """What a P with this engine takes."""
    ends = frozenset({EOS})
    layout, shards = of.layout, of.places
    return ModelLimits(layout, VOCAB, MAX_MODEL_LEN, num_blocks, frozenset(), ends, shards)


class TagMemory:
    """The memory of a pool: KvMemory, block by block."""

    def __init__(
        self, num_blocks: int, shared: bool = False, lent: bool = False, heads: int = 1
    ) -> None:
        """`shared` KV may be read by another transfer than wrote it, for equal tokens; `lent` is
        memory that Ps write to. Each of the `heads` of a block has all its tags."""
        self.lent = lent
        self.heads = heads
        self.cells: list[bytes] = [bytes(BLOCK_BYTES * heads)] * num_blocks
        self.shared = shared

    @property
    def stored(self) -> TagMemory:
        """There is one order of the bytes alone."""
        return self

    @property
    def shared_fd(self) -> int | None:
        """None when nobody else writes to it. In the world it needs no descriptor."""
        return -1 if self.lent else None

    @property
    def host_address(self) -> None:
        """It lies in many places."""

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.cells)

    def read(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        heads: tuple[int, int] | None = None,
    ) -> list[memoryview]:
        """See `KvMemory.read`."""
        first, count = heads or (0, self.heads)
        begin, end = first * BLOCK_BYTES, (first + count) * BLOCK_BYTES
        return [memoryview(self.cells[block])[begin:end] for block in blocks]

    def write(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        payload: memoryview,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """See `KvMemory.write`."""
        first, count = heads or (0, self.heads)
        size, begin = count * BLOCK_BYTES, first * BLOCK_BYTES
        for i, block in enumerate(blocks):
            cell = bytearray(self.cells[block])
            cell[begin : begin + size] = payload[i * size : (i + 1) * size]
            self.cells[block] = bytes(cell)

    # --- the engine ------------------------------------------------------------------------------

    def store(self, table: Sequence[int], tag: Tag) -> None:
        """Write the KV of one token."""
        block, place = table[tag.position // BLOCK], tag.position % BLOCK * _TAG.size
        cell = bytearray(self.cells[block])
        for at in range(place, len(cell), BLOCK_BYTES):
            cell[at : at + _TAG.size] = _TAG.pack(*tag)
        self.cells[block] = bytes(cell)

    def tag(self, table: Sequence[int], position: int) -> Tag:
        """What lies where the KV of one position must lie. WrongKv where that is not the same for
        every head."""
        block, place = table[position // BLOCK], position % BLOCK * _TAG.size
        cell = self.cells[block]
        tags = {_TAG.unpack_from(cell, at) for at in range(place, len(cell), BLOCK_BYTES)}
        if len(tags) > 1:
            raise WrongKv(f"the heads of block {block} have {sorted(tags)}")
        return Tag(*tags.pop())

    def tokens(self, table: Sequence[int], count: int, key: TransferKey) -> list[int]:
        """The first `count` tokens of a transfer as its KV has them. WrongKv where it is not all
        that transfer's own, or where it is shared that of nobody at this position."""
        found = []
        for position in range(count):
            tag = self.tag(table, position)
            own = (tag.transfer, tag.attempt) == writer_of(key)
            if tag.position != position or not (own or (self.shared and tag.transfer)):
                raise WrongKv(f"{key} reads {tag} at position {position}")
            found.append(tag.token)
        return found
