"""A grant of the kit's D: what it wants, what has come, and whether that is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import google_crc32c

from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.kv import KvRule
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.layout import DTYPE_BYTES, KvLayout, Plane
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.protocol.shards import Part, heads_of, place_of
from pd_grpc.v1 import decode_pb2, layout_pb2, transfer_pb2, types_pb2

Place = tuple[int, int, int]
"""Group, layer within the group, logical block."""


class Grant:
    """What D has granted for one Allocate."""

    def __init__(
        self,
        grant_id: str,
        request: decode_pb2.AllocateRequest,
        response: decode_pb2.AllocateResponse,
        layout: KvLayout,
    ) -> None:
        self.grant_id = grant_id
        self.request = request
        self.response = response
        self.layout = layout
        self.first_token: decode_pb2.SendFirstTokenRequest | None = None
        self._came: dict[tuple[int, Place], bytes] = {}
        """Verified bytes of each block of each layer, by shard."""
        self.wanted = {
            b for run in response.wanted for b in range(run.start, run.start + run.count)
        }

    @property
    def kv(self) -> dict[Place, bytes]:
        """Verified bytes of each block of each layer, with the heads of all shards."""
        return {place: self._of_all_shards(place) for place in {place for _, place in self._came}}

    @property
    def complete(self) -> bool:
        """Whether all KV has come."""
        return all(not self.missing(shard) for shard in range(len(self.response.shards)))

    def missing(self, shard: int) -> list[Place]:
        """What has not come to a shard yet."""
        return [
            (group, layer, block)
            for group, layer in layers_of(self.response.shards[shard], self.layout)
            for block in sorted(self.wanted)
            if (shard, (group, layer, block)) not in self._came
        ]

    def verified(self, shard: int) -> list[transfer_pb2.KvRange]:
        """What has come to a shard, a range for each block of each layer."""
        return [
            transfer_pb2.KvRange(
                group=group, layer_start=layer, layer_count=1, block_start=block, block_count=1
            )
            for group, layer in layers_of(self.response.shards[shard], self.layout)
            for block in sorted(self.wanted)
            if (shard, (group, layer, block)) in self._came
        ]

    def store(self, shard: int, chunk: transfer_pb2.KvChunk) -> transfer_pb2.KvRange:
        """Verify a chunk and keep its bytes. Fault as transfer.proto has it."""
        places = self._places(shard, chunk)
        part = self._part(shard)
        if (chunk.head_start, chunk.head_count) not in ((0, 0), (part.head, part.heads)):
            raise bad_request([FieldError("head_start", "heads that this shard does not hold")])
        size = part.layer_bytes(self.layout, chunk.group)
        if len(chunk.payload) != size * len(places):
            text = f"{len(chunk.payload)} bytes for {len(places)} of {size}"
            raise bad_request([FieldError("payload", text)])
        if google_crc32c.value(chunk.payload) != chunk.crc32c:
            raise Fault(Reason.KV_CORRUPT, "crc32c is not that of the payload")
        for i, place in enumerate(places):
            self._came[shard, place] = chunk.payload[i * size : (i + 1) * size]
        return range_of(chunk)

    def _part(self, shard: int) -> Part:
        """What of the model a shard holds."""
        return place_of(self.response.shards[shard], self.layout).part

    def _of_all_shards(self, place: Place) -> bytes:
        """One layer of one block; what has not come is zero."""
        found = bytearray(self.layout.layer_bytes(place[0]))
        for shard in range(len(self.response.shards)):
            came, part = self._came.get((shard, place), b""), self._part(shard)
            at = taken = 0
            for plane in self.layout.groups[place[0]].planes if came else ():
                row = plane.head_dim * DTYPE_BYTES[plane.dtype]
                size = plane.heads * row * self.layout.block_size
                head = size // heads_of(self.layout)
                first, mine = at + part.head * head, part.heads * head
                found[first : first + mine] = came[taken : taken + mine]
                at, taken = at + size, taken + mine
        return bytes(found)

    def _places(self, shard: int, chunk: transfer_pb2.KvChunk) -> list[Place]:
        """The block-layers of a chunk in the order of its bytes."""
        mine = layers_of(self.response.shards[shard], self.layout)
        layers = range(chunk.layer_start, chunk.layer_start + chunk.layer_count)
        blocks = range(chunk.block_start, chunk.block_start + chunk.block_count)
        if not layers or any((chunk.group, layer) not in mine for layer in layers):
            raise bad_request([FieldError("layer_start", "layers that this shard does not hold")])
        if not blocks or any(block not in self.wanted for block in blocks):
            raise bad_request([FieldError("block_start", "blocks that were not wanted")])
        return [(chunk.group, layer, block) for block in blocks for layer in layers]


def range_of(chunk: transfer_pb2.KvChunk) -> transfer_pb2.KvRange:
    """The range of a chunk."""
    return transfer_pb2.KvRange(
        group=chunk.group,
        layer_start=chunk.layer_start,
        layer_count=chunk.layer_count,
        block_start=chunk.block_start,
        block_count=chunk.block_count,
    )


def layers_of(shard: layout_pb2.Shard, layout: KvLayout) -> list[tuple[int, int]]:
    """Group and layer of every layer that a shard holds; it counts them over all groups."""
    every = [(g, layer) for g, group in enumerate(layout.groups) for layer in range(group.layers)]
    count = shard.layer_count or len(every)
    return every[shard.layer_start : shard.layer_start + count]


def expect_kv(grant: Grant, rule: KvRule, tokens: Sequence[int]) -> None:
    """Broken unless every wanted block has come; by the sim's rule, where P follows it, with the
    right bytes at every position of the prompt."""
    kv = grant.kv
    expect(grant.complete, "every wanted block of every layer", f"{len(kv)} of them")
    if not rule.is_sim:
        return
    for chunk in rule.chunks(tokens, sorted(grant.wanted), per_chunk=1):
        size = rule.layout.block_size
        filled = min(size, len(tokens) - chunk.block_start * size)
        got = kv[chunk.group, chunk.layer_start, chunk.block_start]
        planes = rule.layout.groups[chunk.group].planes
        expect_equal(
            _rows(got, size, filled, planes),
            _rows(chunk.payload, size, filled, planes),
            f"KV of group {chunk.group}, layer {chunk.layer_start}, block {chunk.block_start}",
        )


def _rows(layer: bytes, size: int, filled: int, planes: Sequence[Plane]) -> bytes:
    """The bytes of the first `filled` tokens of each plane and head; the rest is undefined."""
    found, at = [], 0
    for plane in planes:
        row = plane.head_dim * DTYPE_BYTES[plane.dtype]
        for _head in range(plane.heads):
            found.append(layer[at : at + filled * row])
            at += size * row
    return b"".join(found)


def block_ranges(blocks: Iterable[int]) -> list[types_pb2.BlockRange]:
    """Runs of blocks, ascending."""
    runs: list[types_pb2.BlockRange] = []
    for block in sorted(blocks):
        if runs and runs[-1].start + runs[-1].count == block:
            runs[-1].count += 1
        else:
            runs.append(types_pb2.BlockRange(start=block, count=1))
    return runs
