"""A block pool's bytes in host memory, as they lie there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from pd_grpc.protocol.extents import joined
from pd_grpc.protocol.layout import DTYPE_BYTES, KvLayout
from pd_grpc.protocol.shards import Part, whole


class HostKvMemory:
    """`num_blocks` blocks over any writable buffer: a bytearray, a CPU tensor, a memfd.

    Blocks lie one after another, each with its groups and layers in the canonical order restricted
    to the part of the model that is here, so a whole block is one slice, a layer of it another, and
    a range of heads one in each plane: many and short, so that these are gathered and scattered all
    at once. The bytes of a layer are in the layout's format; where that
    is not canonical this is what `KvMemory.stored` is for, and has no part and no range of heads.
    """

    def __init__(
        self,
        buffer: bytearray | memoryview,
        layout: KvLayout,
        shared_fd: int | None = None,
        part: Part | None = None,
    ) -> None:
        """`buffer` holds a whole number of blocks, at least one; ValueError if not. `shared_fd` is
        the memfd that it maps, if it does; it stays the caller's. `part` is what of the model is
        here, None all of it."""
        self._part = whole(layout) if part is None else part
        # Reckoned once: a chunk asks for each of its blocks.
        self._block_bytes = self._part.block_bytes(layout)
        view = memoryview(buffer).cast("B")
        if not view.nbytes or view.nbytes % self._block_bytes:
            raise ValueError(
                f"a pool of {view.nbytes} bytes is not a whole number of blocks of "
                f"{self._block_bytes} bytes"
            )
        self._view = view
        self._layout = layout
        self._shared_fd = shared_fd
        self._read_only = view.toreadonly()
        self._num_blocks = view.nbytes // self._block_bytes
        self._groups = _groups_of(self._part, layout)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def stored(self) -> HostKvMemory:
        return self

    @property
    def shared_fd(self) -> int | None:
        return self._shared_fd

    @property
    def host_address(self) -> int | None:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._view))

    def read(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        heads: tuple[int, int] | None = None,
    ) -> list[memoryview]:
        view = self._read_only
        if heads is None or heads == (self._part.head, self._part.heads):
            offset, size = self._slice(group, layer, layers)
            starts = self._starts(blocks, offset)
            if size != self._block_bytes:
                return [view[at : at + size] for at in starts]
            return [view[at:end] for at, end in joined(starts, size)]
        runs = self._plane_runs(group, layer, layers, heads)
        at = self._indices(blocks)
        rows = [run[at].reshape(len(at), layers, run.shape[2] * run.shape[3]) for run in runs]
        gathered = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=2)
        return [gathered.reshape(-1).data.toreadonly()]

    def write(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        payload: memoryview,
        heads: tuple[int, int] | None = None,
    ) -> None:
        source = payload.cast("B")
        if heads is not None and heads != (self._part.head, self._part.heads):
            self._scatter(blocks, self._plane_runs(group, layer, layers, heads), source)
            return
        offset, size = self._slice(group, layer, layers)
        _check_size(payload, blocks, layers, size)
        for i, start in enumerate(self._starts(blocks, offset)):
            self._view[start : start + size] = source[i * size : (i + 1) * size]

    def _scatter(
        self, blocks: Sequence[int], runs: Sequence[npt.NDArray[np.uint8]], source: memoryview
    ) -> None:
        """Write heads to runs of planes, of which `source` has those of a layer together."""
        sizes = [run.shape[2] * run.shape[3] for run in runs]
        layers = runs[0].shape[1]
        _check_size(source, blocks, layers, layers * sum(sizes))
        indices, taken = self._indices(blocks), 0
        rows = np.frombuffer(source, np.uint8).reshape(len(indices), layers, sum(sizes))
        for run, size in zip(runs, sizes, strict=True):
            mine = rows[:, :, taken : taken + size]
            run[indices] = mine.reshape(len(indices), layers, *run.shape[2:])
            taken += size

    def _slice(self, group: int, layer: int, layers: int) -> tuple[int, int]:
        """Where layers begin in a block, and how many bytes they have."""
        first, held, offset, layer_bytes = self._groups.get(group, (0, 0, 0, 0))
        if layer < first or layers < 1 or layer + layers > first + held:
            there = f"it has {held}" + (f" here, from {first} on" if first else "")
            raise ValueError(f"layers [{layer}, {layer + layers}) of group {group}: {there}")
        return offset + (layer - first) * layer_bytes, layers * layer_bytes

    def _plane_runs(
        self, group: int, layer: int, layers: int, heads: tuple[int, int]
    ) -> list[npt.NDArray[np.uint8]]:
        """Some heads of some layers in all blocks, as views of the pool: one for each run of planes
        that are alike, of shape (block, layer, plane, byte)."""
        offset, size = self._slice(group, layer, layers)
        head, count = heads
        part = self._part
        if head < part.head or count < 1 or head + count > part.head + part.heads:
            there = f"[{part.head}, {part.head + part.heads})"
            raise ValueError(f"heads [{head}, {head + count}): {there} are here")
        blocks = np.frombuffer(self._view, np.uint8).reshape(self._num_blocks, -1)
        here = blocks[:, offset : offset + size].reshape(self._num_blocks, layers, -1)
        found, at = [], 0
        tokens, planes_here = self._layout.block_size, self._layout.groups[group].planes
        sizes = [plane.head_dim * DTYPE_BYTES[plane.dtype] * tokens for plane in planes_here]
        for head_bytes, alike in groupby(sizes):
            planes, plane_bytes = len(list(alike)), part.heads * head_bytes
            run = here[:, :, at : at + planes * plane_bytes]
            run = run.reshape(self._num_blocks, layers, planes, plane_bytes)
            first = (head - part.head) * head_bytes
            found.append(run[:, :, :, first : first + count * head_bytes])
            at += planes * plane_bytes
        return found

    def _indices(self, blocks: Sequence[int]) -> npt.NDArray[np.intp]:
        self._check(blocks)
        return np.asarray(blocks, np.intp)

    def _starts(self, blocks: Sequence[int], offset: int) -> list[int]:
        self._check(blocks)
        size = self._block_bytes
        return [block * size + offset for block in blocks]

    def _check(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not 0 <= block < self._num_blocks:
                raise ValueError(f"block {block} is outside the pool of {self._num_blocks}")


def _check_size(payload: memoryview, blocks: Sequence[int], layers: int, size: int) -> None:
    """ValueError unless `payload` has `size` bytes for each block."""
    if payload.nbytes != size * len(blocks):
        raise ValueError(
            f"payload has {payload.nbytes} bytes; {len(blocks)} blocks of {layers} layers "
            f"take {size * len(blocks)}"
        )


def _groups_of(part: Part, layout: KvLayout) -> dict[int, tuple[int, int, int, int]]:
    """Of each group of which layers are here: the first, how many, where they begin in a block, and
    the bytes of one."""
    found, offset = {}, 0
    for group, layer, layers in part.runs(layout):
        layer_bytes = part.layer_bytes(layout, group)
        found[group] = layer, layers, offset, layer_bytes
        offset += layers * layer_bytes
    return found
