"""How the KV of a grant comes, as D's machine knows it."""

from __future__ import annotations

from dataclasses import dataclass

from pd_grpc.protocol.layout import CANONICAL
from pd_grpc.v1 import layout_pb2


@dataclass(frozen=True)
class Carrier:
    """A transport by its value on the wire: whether P writes into D's memory itself, what it needs
    for that, which goes into the shard's `transport_metadata`, and the format of the bytes."""

    transport: int
    one_sided: bool = False
    metadata: bytes = b""
    kv_format: str = CANONICAL

    def shard(self, shard: layout_pb2.Shard) -> layout_pb2.Shard:
        """A shard as a P is told of it that uses this transport."""
        if not self.metadata:
            return shard
        told = layout_pb2.Shard()
        told.CopyFrom(shard)
        told.transport_metadata = self.metadata
        return told


INLINE_CARRIER = Carrier(layout_pb2.TRANSPORT_INLINE)
