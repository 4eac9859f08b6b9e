"""What chunks of every transport have in common."""

from __future__ import annotations

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.transport.base import Slab
from pd_grpc.v1 import transfer_pb2


def chunk_of(slab: Slab, crc32c: int, heads: tuple[int, int] | None = None) -> transfer_pb2.KvChunk:
    """A chunk without its bytes; `heads` (first, count) where it says which it has."""
    head_start, head_count = heads or (0, 0)
    return transfer_pb2.KvChunk(
        group=slab.group,
        layer_start=slab.layer,
        layer_count=slab.layers,
        block_start=slab.block,
        block_count=slab.blocks,
        crc32c=crc32c,
        head_start=head_start,
        head_count=head_count,
    )


def corrupt(chunk: transfer_pb2.KvChunk) -> Fault:
    """Bytes that are not what was sent."""
    layers = f"[{chunk.layer_start}, {chunk.layer_start + chunk.layer_count})"
    blocks = f"[{chunk.block_start}, {chunk.block_start + chunk.block_count})"
    return Fault(
        Reason.KV_CORRUPT,
        f"checksum differs for layers {layers}, blocks {blocks} of group {chunk.group}",
        {"group": str(chunk.group), "layers": layers, "blocks": blocks},
    )
