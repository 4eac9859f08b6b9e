"""A pool that holds each layer of a block token by token, and speaks the canonical order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.plane_arrays import canonical_order
from pd_grpc.protocol.layout import DTYPE_BYTES, KvLayout


class TokenMajorMemory:
    """Slabs of a token-major pool, converted: one copy more than `stored` takes, either way."""

    def __init__(self, stored: HostKvMemory, layout: KvLayout) -> None:
        """`stored` has the pool's bytes as they lie."""
        self.stored = stored
        self._layout = layout
        orders = [canonical_order(group, layout.block_size) for group in layout.groups]
        self._to_canonical = orders
        self._to_stored = [np.argsort(order) for order in orders]

    @property
    def num_blocks(self) -> int:
        return self.stored.num_blocks

    @property
    def shared_fd(self) -> int | None:
        return self.stored.shared_fd

    @property
    def host_address(self) -> int | None:
        return self.stored.host_address

    def read(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        heads: tuple[int, int] | None = None,
    ) -> list[memoryview]:
        order = self._to_canonical[group][self._bytes_of(group, heads)]
        size = len(self._to_canonical[group])
        pieces = self.stored.read(blocks, group, layer, layers)
        return [_reordered(piece, order, size) for piece in pieces]

    def write(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        payload: memoryview,
        heads: tuple[int, int] | None = None,
    ) -> None:
        if heads is not None:
            payload = self._merged(blocks, group, layer, layers, payload, heads)
        order = self._to_stored[group]
        if payload.nbytes != len(blocks) * layers * len(order):
            raise ValueError(
                f"payload has {payload.nbytes} bytes; {len(blocks)} blocks of {layers} layers "
                f"take {len(blocks) * layers * len(order)}"
            )
        self.stored.write(blocks, group, layer, layers, _reordered(payload, order, len(order)))

    def _merged(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        payload: memoryview,
        heads: tuple[int, int],
    ) -> memoryview:
        """A canonical slab of what is there with `heads` as in `payload`."""
        there = np.frombuffer(b"".join(self.read(blocks, group, layer, layers)), np.uint8).copy()
        mine = self._bytes_of(group, heads)
        size = len(blocks) * layers * len(self._to_canonical[group][mine])
        if payload.nbytes != size:
            raise ValueError(f"payload has {payload.nbytes} bytes; heads {heads} take {size}")
        rows = there.reshape(len(blocks) * layers, -1)
        rows[:, mine] = np.frombuffer(payload, np.uint8).reshape(len(rows), -1)
        return there.data

    def _bytes_of(self, group: int, heads: tuple[int, int] | None) -> slice | npt.NDArray[np.intp]:
        """Where some heads lie in a canonical layer of a block; None is all of them."""
        if heads is None:
            return slice(None)
        first, count = heads
        found, at = [], 0
        for plane in self._layout.groups[group].planes:
            head = plane.head_dim * DTYPE_BYTES[plane.dtype] * self._layout.block_size
            found.append(np.arange(at + first * head, at + (first + count) * head, dtype=np.intp))
            at += plane.heads * head
        return np.concatenate(found)


def _reordered(slab: memoryview, order: npt.NDArray[np.intp], size: int) -> memoryview:
    """A copy of a slab in which byte i of each layer of a block, of `size` bytes, is byte
    `order[i]` of it."""
    layers = np.frombuffer(slab, np.uint8).reshape(-1, size)
    return layers.take(order, axis=1).reshape(-1).data.toreadonly()
