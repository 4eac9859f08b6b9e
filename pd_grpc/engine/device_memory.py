"""A block pool's bytes on a device, reached through pinned memory of the host."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pd_grpc.engine.device import Event, Streams, placed
from pd_grpc.protocol.layout import KvLayout

SLOT_BYTES = 1 << 20
"""Of one pinned buffer: about what a chunk on the wire carries."""
SLOTS = 4
"""Buffers each way: while the device fills one the host empties another, and the two may differ in
speed for a while. What is under way in each direction has room in them, or waits."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class _Part:
    """What of a slab goes through one buffer: its blocks, and layers counted within the slab."""

    blocks: Sequence[int]
    layer: int
    layers: int


class DeviceKvMemory:
    """The whole of a model's pool, of one group, in the canonical order.

    A read gathers blocks on the device, copies them into pinned memory and, when they are there,
    out of it: the pieces own their bytes. It may be asked for what `on_layer` has told of, which
    the device has stored by then. A write returns once the bytes are in pinned memory. They are in
    the pool for every later read, and for what the model's stream does after it has waited for
    `written`.

    Both block the thread that calls, a read for as long as its own copy takes, and either while
    all buffers of its direction are under way. Neither waits for the model.
    """

    def __init__(self, blocks: torch.Tensor, layout: KvLayout, streams: Streams) -> None:
        """`blocks` is `(blocks, layers, planes, heads, block_size, head_dim)`, contiguous; the
        planes of `layout`'s one group are alike."""
        group, plane = layout.groups[0], layout.groups[0].planes[0]
        shape = (group.layers, len(group.planes), plane.heads, layout.block_size, plane.head_dim)
        if len(layout.groups) != 1 or blocks.shape[1:] != shape:
            raise ValueError(f"a pool of shape {tuple(blocks.shape)} is not one of this layout")
        row = blocks.shape[-1] * blocks.element_size()
        # Bits are moved, not numbers, and in as few pieces as a row allows.
        word = next(dtype for dtype in _WORDS if row % dtype.itemsize == 0)
        self._pool = blocks.view(torch.uint8).view(word)
        self._layers = group.layers
        self._heads = plane.heads
        self._head_bytes = len(group.planes) * layout.block_size * row
        self._slot_bytes = max(SLOT_BYTES, self._heads * self._head_bytes)
        self._streams = streams
        self._out = streams.another()
        self._in = streams.another()
        self._out_slots = [streams.pinned(self._slot_bytes) for _ in range(SLOTS)]
        self._in_slots = [streams.pinned(self._slot_bytes) for _ in range(SLOTS)]
        self._in_events: deque[Event] = deque()
        self._in_next = 0
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._written: Event | None = None

    @property
    def num_blocks(self) -> int:
        return len(self._pool)

    @property
    def stored(self) -> DeviceKvMemory:
        return self

    @property
    def shared_fd(self) -> int | None:
        return None

    @property
    def host_address(self) -> int | None:
        return None

    @property
    def written(self) -> Event | None:
        """When all writes so far are in the pool; None when there were none."""
        return self._written

    @torch.inference_mode()
    def read(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        heads: tuple[int, int] | None = None,
    ) -> list[memoryview]:
        view = self._view(blocks, group, layer, layers, heads)
        pieces: list[memoryview] = []
        under_way: deque[tuple[torch.Tensor, Event]] = deque()
        with self._reading:
            if self._written is not None:
                self._out.wait(self._written)
            for i, part in enumerate(self._parts(blocks, layers, view)):
                if len(under_way) == SLOTS:
                    pieces.append(_copied_out(*under_way.popleft()))
                there = view[:, part.layer : part.layer + part.layers]
                with self._out.use():
                    (indices,) = placed(view.device, torch.tensor(part.blocks))
                    gathered = there.index_select(0, indices).reshape(-1).view(torch.uint8)
                    slot = self._out_slots[i % SLOTS][: gathered.numel()]
                    slot.copy_(gathered, non_blocking=True)
                under_way.append((slot, self._out.record()))
            pieces += [_copied_out(*each) for each in under_way]
        return pieces

    @torch.inference_mode()
    def write(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        payload: memoryview,
        heads: tuple[int, int] | None = None,
    ) -> None:
        view = self._view(blocks, group, layer, layers, heads)
        size = view[0].numel() * view.element_size()
        if payload.nbytes != size * len(blocks):
            raise ValueError(
                f"payload has {payload.nbytes} bytes; {len(blocks)} blocks of {layers} layers "
                f"take {size * len(blocks)}"
            )
        source, taken = np.frombuffer(payload, np.uint8), 0
        with self._writing:
            for part in self._parts(blocks, layers, view):
                there = view[:, part.layer : part.layer + part.layers]
                nbytes = len(part.blocks) * there[0].numel() * view.element_size()
                slot = self._free_slot()[:nbytes]
                slot.numpy()[:] = source[taken : taken + nbytes]
                taken += nbytes
                with self._in.use():
                    (indices,) = placed(view.device, torch.tensor(part.blocks))
                    arrived = torch.empty(nbytes, dtype=torch.uint8, device=view.device)
                    arrived.copy_(slot, non_blocking=True)
                    rows = arrived.view(view.dtype).view(len(part.blocks), *there.shape[1:])
                    there.index_copy_(0, indices, rows)
                event = self._in.record()
                self._in_events.append(event)
                self._written = event

    def _free_slot(self) -> torch.Tensor:
        if len(self._in_events) == SLOTS:
            self._in_events.popleft().wait()
        slot = self._in_slots[self._in_next]
        self._in_next = (self._in_next + 1) % SLOTS
        return slot

    def _view(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        heads: tuple[int, int] | None,
    ) -> torch.Tensor:
        """Layers and heads of all blocks. ValueError for what is not there: a device that is told
        to go there is of no use for anything afterwards."""
        held = self._layers if group == 0 else 0
        if layer < 0 or layers < 1 or layer + layers > held:
            raise ValueError(f"layers [{layer}, {layer + layers}) of group {group}: it has {held}")
        head, count = (0, self._heads) if heads is None else heads
        if head < 0 or count < 1 or head + count > self._heads:
            raise ValueError(f"heads [{head}, {head + count}): [0, {self._heads}) are here")
        for block in blocks:
            if not 0 <= block < len(self._pool):
                raise ValueError(f"block {block} is outside the pool of {len(self._pool)}")
        return self._pool[:, layer : layer + layers, :, head : head + count]

    def _parts(self, blocks: Sequence[int], layers: int, view: torch.Tensor) -> Iterator[_Part]:
        """The slab in the order of its bytes, in parts that a buffer has room for."""
        layer_bytes = view[0, 0].numel() * view.element_size()
        together = self._slot_bytes // (layers * layer_bytes)
        if together:
            for at in range(0, len(blocks), together):
                yield _Part(blocks[at : at + together], 0, layers)
            return
        together = self._slot_bytes // layer_bytes
        for block in blocks:
            for at in range(0, layers, together):
                yield _Part([block], at, min(together, layers - at))


def _copied_out(slot: torch.Tensor, event: Event) -> memoryview:
    event.wait()
    return memoryview(slot.numpy().tobytes())
