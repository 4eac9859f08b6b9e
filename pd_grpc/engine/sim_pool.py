"""The sim engine's hand on its pool: a token's bytes into each group, and a checksum out of it."""

from __future__ import annotations

from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from pd_grpc.engine.plane_arrays import canonical_order, plane_arrays
from pd_grpc.protocol.layout import CANONICAL, KvLayout

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]

_CHECKSUM_BLOCKS = 1024
"""Blocks copied together for a checksum; bounds the copy of a long context."""


@dataclass(frozen=True)
class _Plane:
    """Its bytes in the pool, `(blocks, layers, heads, slots, row)`, and in a token's layer."""

    stored: Bytes
    start: int
    end: int


class SimGroup:
    """One group of the layout, over all blocks."""

    def __init__(self, pool: Bytes, layout: KvLayout, group: int) -> None:
        """`pool` is `(blocks, bytes of a block)`."""
        self.layers = layout.groups[group].layers
        self._window = layout.groups[group].window
        self._block_size = layout.block_size
        self._token_bytes = layout.groups[group].token_bytes
        self._start = sum(each.layers * each.token_bytes for each in layout.groups[:group])
        at = layout.layer_offset(group, 0)
        self._region = pool[:, at : at + self.layers * layout.layer_bytes(group)]
        whole = self._region.reshape(len(pool), self.layers, layout.layer_bytes(group))
        own = layout.groups[group]
        token_major = layout.format != CANONICAL
        self._order = canonical_order(own, layout.block_size) if token_major else None
        self._planes = []
        start = 0
        for plane, stored in zip(
            own.planes, plane_arrays(whole, own, layout.block_size, token_major), strict=True
        ):
            assert np.shares_memory(stored, pool)
            self._planes.append(_Plane(stored, start, start + plane.token_bytes))
            start += plane.token_bytes

    def store_layer(self, layer: int, blocks: Indices, slots: Indices, kv: Bytes) -> None:
        """Write a layer of many tokens, of whose KV `kv` has all bytes, a token in each row."""
        at = self._start + layer * self._token_bytes
        for plane in self._planes:
            _, _, heads, _, row = plane.stored.shape
            part = kv[:, at + plane.start : at + plane.end]
            plane.stored[blocks, layer, :, slots] = part.reshape(len(kv), heads, row)

    def store_token(self, block: int, slot: int, kv: Bytes) -> None:
        """Write every layer of one token, of whose KV `kv` has all bytes."""
        end = self._start + self.layers * self._token_bytes
        own = kv[self._start : end].reshape(self.layers, self._token_bytes)
        for plane in self._planes:
            _, _, heads, _, row = plane.stored.shape
            part = own[:, plane.start : plane.end]
            plane.stored[block, :, :, slot] = part.reshape(self.layers, heads, row)

    def first_bytes(self, block: int, slot: int) -> bytes:
        """The first plane of the first layer of one token."""
        return self._planes[0].stored[block, 0, :, slot].tobytes()

    def checksum(self, crc: int, table: Indices, tokens: int) -> int:
        """`crc` continued over what of the first `tokens` tokens attention sees: all of them, or
        the last ones where the group has a window."""
        start = max(0, tokens - self._window) if self._window else 0
        block, slot = divmod(start, self._block_size)
        full, rest = divmod(tokens, self._block_size)
        if slot:
            last = min(self._block_size, tokens - block * self._block_size)
            crc = google_crc32c.extend(crc, self._part(table[block], slot, last))
            block += 1
        for first in range(block, full, _CHECKSUM_BLOCKS):
            some = table[first : min(first + _CHECKSUM_BLOCKS, full)]
            crc = google_crc32c.extend(crc, self._whole(some))
        if rest and full >= block:
            crc = google_crc32c.extend(crc, self._part(table[full], 0, rest))
        return crc

    def _whole(self, blocks: Indices) -> Bytes:
        """The group's bytes of whole blocks, canonical."""
        stored = self._region.take(blocks, axis=0)
        if self._order is None:
            return stored
        return stored.reshape(len(blocks), self.layers, -1).take(self._order, axis=-1)

    def _part(self, block: int, first: int, end: int) -> bytes:
        """The group's bytes of some slots of a block, canonical."""
        parts = [
            plane.stored[block, :, :, first:end].reshape(self.layers, -1) for plane in self._planes
        ]
        return np.concatenate(parts, axis=1).tobytes()
