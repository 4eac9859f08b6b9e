"""A block pool's bytes in host memory, in the canonical order."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.protocol.layout import KvLayout


class HostKvMemory:
    """`num_blocks` blocks over any writable buffer: a bytearray, a CPU tensor, a memfd.

    Blocks lie one after another, each in the canonical order, so a whole block is one slice and a
    layer of it another.
    """

    def __init__(
        self, buffer: bytearray | memoryview, layout: KvLayout, shared_fd: int | None = None
    ) -> None:
        """`buffer` holds a whole number of blocks of `layout`, at least one; ValueError if not.
        `shared_fd` is the memfd that it maps, if it does; it stays the caller's."""
        view = memoryview(buffer).cast("B")
        if not view.nbytes or view.nbytes % layout.block_bytes:
            raise ValueError(
                f"a pool of {view.nbytes} bytes is not a whole number of blocks of "
                f"{layout.block_bytes} bytes"
            )
        self._view = view
        self._layout = layout
        self._shared_fd = shared_fd
        self._read_only = view.toreadonly()
        # Reckoned once: a chunk asks for each of its blocks.
        self._block_bytes = layout.block_bytes
        self._num_blocks = view.nbytes // self._block_bytes

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def shared_fd(self) -> int | None:
        return self._shared_fd

    def read(self, blocks: Sequence[int], group: int, layer: int, layers: int) -> list[memoryview]:
        offset, size = self._slice(group, layer, layers)
        view = self._read_only
        return [view[at : at + size] for at in self._starts(blocks, offset)]

    def write(
        self, blocks: Sequence[int], group: int, layer: int, layers: int, payload: memoryview
    ) -> None:
        offset, size = self._slice(group, layer, layers)
        if payload.nbytes != size * len(blocks):
            raise ValueError(
                f"payload has {payload.nbytes} bytes; {len(blocks)} blocks of {layers} layers "
                f"take {size * len(blocks)}"
            )
        source = payload.cast("B")
        for i, at in enumerate(self._starts(blocks, offset)):
            self._view[at : at + size] = source[i * size : (i + 1) * size]

    def _slice(self, group: int, layer: int, layers: int) -> tuple[int, int]:
        held = self._layout.groups[group].layers
        if layer < 0 or layers < 1 or layer + layers > held:
            raise ValueError(f"layers [{layer}, {layer + layers}) of group {group}: it has {held}")
        return self._layout.layer_offset(group, layer), layers * self._layout.layer_bytes(group)

    def _starts(self, blocks: Sequence[int], offset: int) -> list[int]:
        for block in blocks:
            if not 0 <= block < self._num_blocks:
                raise ValueError(f"block {block} is outside the pool of {self._num_blocks}")
        size = self._block_bytes
        return [block * size + offset for block in blocks]
