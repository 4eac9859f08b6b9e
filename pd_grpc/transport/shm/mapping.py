"""D's pool as P sees it: the memory, and who of P still uses it."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from pd_grpc.protocol.extents import joined
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.transport.shm.copy_queue import Copy, copies


class NotOurs(Exception):
    """A descriptor that is not of the pool it is said to be; the message says why."""


class PoolMapping:
    """A mapped pool."""

    def __init__(self, fd: int, pool_bytes: int, layout: KvLayout) -> None:
        """`fd` stays the caller's, who may close it. NotOurs when it is no memfd of that size that
        keeps its size, or that holds no whole number of blocks."""
        _check_seals(fd)
        size = os.fstat(fd).st_size
        if size != pool_bytes:
            raise NotOurs(f"the memfd has {size} bytes, the pool {pool_bytes}")
        if not size or size % layout.block_bytes:
            raise NotOurs(f"{size} bytes are not blocks of {layout.block_bytes} bytes")
        try:
            self._map = mmap.mmap(fd, size)
            # A process forked from this one would go on writing where this one had stopped.
            if sys.platform == "linux":
                self._map.madvise(mmap.MADV_DONTFORK)
        except OSError as error:
            raise NotOurs(f"the memfd cannot be mapped: {error.strerror}") from error
        self._view = memoryview(self._map)
        self._layout = layout
        # Reckoned once: a slab asks for each of its blocks.
        self._block_bytes = layout.block_bytes
        self.num_blocks = size // layout.block_bytes

    def copies(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        pieces: Sequence[memoryview],
    ) -> Iterator[Copy]:
        """What writes a slab, given in pieces to be joined in order, to physical `blocks`.
        ValueError when a block is outside the pool or the pieces have another size."""
        offset = self._layout.layer_offset(group, layer)
        size = layers * self._layout.layer_bytes(group)
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is outside the pool of {self.num_blocks}")
        if sum(piece.nbytes for piece in pieces) != size * len(blocks):
            raise ValueError(f"the pieces are not {len(blocks)} times {size} bytes")
        starts = [block * self._block_bytes + offset for block in blocks]
        return copies([self._view[at:end] for at, end in joined(starts, size)], pieces)

    def close(self) -> None:
        """Unmap it."""
        self._view.release()
        self._map.close()


def _check_seals(fd: int) -> None:
    """NotOurs unless no write can meet memory that is gone."""
    if sys.platform != "linux":
        raise NotOurs("only Linux has memory to share of this kind")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise NotOurs("the descriptor is no memfd") from None
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if seals & needed != needed:
        raise NotOurs("the memfd is not sealed against shrinking and growing")


class Attachment:
    """A pool that P has borrowed, for as long as it is wanted or a stream writes to it."""

    def __init__(self, pool_id: bytes, mapping: PoolMapping, let_go: Callable[[], None]) -> None:
        """`let_go` is called once the pool is unmapped."""
        self.pool_id = pool_id
        self.mapping = mapping
        self._let_go = let_go
        self._streams = 0
        self._wanted = True

    def hold(self) -> None:
        """A stream writes to it."""
        self._streams += 1

    def release(self) -> None:
        """A stream writes to it no more."""
        self._streams -= 1
        self._settle()

    def forget(self) -> None:
        """No further stream will write to it."""
        if self._wanted:
            self._wanted = False
            self._settle()

    def _settle(self) -> None:
        if not self._wanted and not self._streams:
            self.mapping.close()
            self._let_go()
