"""The pools that KV is moved between: their layout, what is in them, and who has which blocks."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pd_grpc.blocks.pool import BlockPool, Holding
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.pool_buffer import PoolBuffer
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind

LAYERS = 16
LAYOUT = KvLayout(
    model="kv-bench",
    positions="none",
    block_size=16,
    groups=(
        KvGroup(
            GroupKind.FULL,
            LAYERS,
            (
                Plane(PlaneKind.K, "bfloat16", 8, 64),
                Plane(PlaneKind.V, "bfloat16", 8, 64),
            ),
        ),
    ),
)
"""That of Llama 3.2 1B in bf16 (its config.json: 16 layers, 8 KV heads of 64): 32 KiB a token, and
at 16 tokens to a block 512 KiB a block, 32 KiB a layer of one."""

MIB = 1 << 20
_POISON = 0xA5


class KvPool:
    """A pool of real bytes, and its accounts."""

    def __init__(self, num_blocks: int, seed: int | None, shared: bool = False) -> None:
        """Every page of it is touched: with random bytes of `seed`, or with none worth keeping. It
        lies in a memfd if it is `shared`."""
        self.bytes: npt.NDArray[np.uint8]
        size = num_blocks * LAYOUT.block_bytes
        self._buffer: PoolBuffer | None = None
        if shared:
            self._buffer = PoolBuffer(size, shared=True)
            self.bytes = np.frombuffer(self._buffer.view, np.uint8)
        else:
            self.bytes = np.empty(size, np.uint8)
        if seed is None:
            self.bytes.fill(_POISON)
        else:
            words = np.random.default_rng(seed).integers(0, 1 << 63, size // 8, np.int64)
            self.bytes[:] = words.view(np.uint8)
        fd = None if self._buffer is None else self._buffer.fd
        self.memory = HostKvMemory(self.bytes.data, LAYOUT, fd)
        self.accounts = BlockPool(num_blocks)
        self._rows = self.bytes.reshape(num_blocks, LAYOUT.block_bytes)
        self._digests: dict[int, int] = {}

    def take(
        self, transfers: int, blocks: int, fragmented: bool, seed: int, owner: str
    ) -> list[Holding]:
        """Blocks for so many transfers: of each one run, or from all over the pool in no order."""
        order = list(range(self.accounts.total))
        if fragmented:
            random.Random(seed).shuffle(order)
        self._arrange(order)
        return [self.accounts.reserve(blocks, owner=f"{owner}-{i}") for i in range(transfers)]

    def poison(self, tables: Sequence[Sequence[int]]) -> None:
        """Forget what is in these blocks, so that what was there before cannot pass for what should
        have come."""
        for table in tables:
            for block in table:
                self._rows[block] = _POISON

    def digests(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """A CRC-32 for each block, which no transport reckons with."""
        return [[zlib.crc32(self._rows[block]) for block in table] for table in tables]

    def known_digests(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """The same of a pool that nothing is written to."""
        for block in {block for table in tables for block in table} - self._digests.keys():
            self._digests[block] = zlib.crc32(self._rows[block])
        return [[self._digests[block] for block in table] for table in tables]

    def region(self, table: Sequence[int]) -> memoryview:
        """The bytes of one run of blocks; ValueError when it is more than one."""
        if list(table) != list(range(table[0], table[0] + len(table))):
            raise ValueError("table: the blocks are no single run")
        start = table[0] * LAYOUT.block_bytes
        return self.bytes.data[start : start + len(table) * LAYOUT.block_bytes]

    def give_back(self, holdings: Sequence[Holding]) -> None:
        """Everything is free again. PoolCorrupt when the accounts do not say so."""
        for holding in holdings:
            holding.release()
        self.accounts.check()
        assert self.accounts.free == self.accounts.total, self.accounts.counts()

    def _arrange(self, order: Sequence[int]) -> None:
        """Have the accounts give out blocks in this order."""
        held = {}
        while self.accounts.free:
            holding = self.accounts.reserve(1, owner="arranging")
            held[holding.blocks[0]] = holding
        for block in order:
            held[block].release()
