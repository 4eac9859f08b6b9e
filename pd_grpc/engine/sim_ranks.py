"""The sim engine's KV cut over ranks, each with a memory of its own."""

from __future__ import annotations

import numpy as np

from pd_grpc.engine.base import EngineShard
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.sim_pool import Bytes, Indices
from pd_grpc.protocol.layout import CANONICAL, DTYPE_BYTES, KvLayout
from pd_grpc.protocol.shards import Part, Place, heads_of


class SimRanks:
    """Ranks that together hold what `whole` has a copy of: one row of canonical bytes for each
    block of the pool.

    `pull` makes the copy that of the ranks, `push` the ranks that of the copy. Where several ranks
    hold the same heads, push writes to each of them, and pull takes the bytes of one: the first, or
    for `replica` n the n-th, counted round.
    """

    def __init__(self, layout: KvLayout, places: tuple[Place, ...], whole: Bytes) -> None:
        """ValueError for a layout that is not canonical: only whole layers can be cut then."""
        if layout.format != CANONICAL:
            raise ValueError(f"sim_format: {layout.format} has one rank alone")
        self._whole = whole
        self._pools: list[Bytes] = []
        self._places: list[Indices] = []
        """Of each byte of a rank's block where it lies in the whole block."""
        self._layers: dict[tuple[int, int], list[tuple[int, slice]]] = {}
        """By group and layer, the ranks that hold some of it and where in their blocks."""
        shards = []
        for rank, place in enumerate(places):
            pool = np.zeros((len(whole), place.part.block_bytes(layout)), np.uint8)
            memory = HostKvMemory(pool.data, layout, part=place.part)
            shards.append(EngineShard(place, memory))
            self._pools.append(pool)
            self._places.append(_bytes_of(place.part, layout))
            at = 0
            for group, first, layers in place.part.runs(layout):
                size = place.part.layer_bytes(layout, group)
                for layer in range(first, first + layers):
                    self._layers.setdefault((group, layer), []).append((rank, slice(at, at + size)))
                    at += size
        self.shards = tuple(shards)
        self._holders: dict[Part, list[int]] = {}
        for rank, place in enumerate(places):
            self._holders.setdefault(place.part, []).append(rank)
        self.replicas = max(len(ranks) for ranks in self._holders.values())

    def pull(self, blocks: Indices, replica: int = 0) -> None:
        """Copy blocks from the ranks."""
        for ranks in self._holders.values():
            rank = ranks[replica % len(ranks)]
            self._whole[np.ix_(blocks, self._places[rank])] = self._pools[rank][blocks]

    def push(self, blocks: Indices, group: int, layer: int) -> None:
        """Copy one layer of blocks to every rank that holds some of it."""
        for rank, where in self._layers[group, layer]:
            rows = self._whole[np.ix_(blocks, self._places[rank][where])]
            self._pools[rank][blocks, where] = rows


def _bytes_of(part: Part, layout: KvLayout) -> Indices:
    """Where each byte of a part lies in a whole block, in the part's own order."""
    found = []
    every = heads_of(layout)
    for group, first, layers in part.runs(layout):
        for layer in range(first, first + layers):
            at = layout.layer_offset(group, layer)
            for plane in layout.groups[group].planes:
                elements = plane.heads * plane.head_dim * layout.block_size
                size = elements * DTYPE_BYTES[plane.dtype]
                head = size // every
                found.append(np.arange(at + head * part.head, at + head * (part.head + part.heads)))
                at += size
    return np.concatenate(found)
