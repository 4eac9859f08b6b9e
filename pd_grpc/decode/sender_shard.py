"""P's shard as D takes it in v1: one that holds everything."""

from __future__ import annotations

from pd_grpc.protocol.layout import KvLayout, Mismatch
from pd_grpc.v1 import layout_pb2

_KINDS = ("tp", "pp", "cp", "dp")


def missing_part(shard: layout_pb2.Shard, layout: KvLayout) -> Mismatch | None:
    """The first field by which a shard is one of several, or holds only some layers or heads; None
    for one that holds everything, whether it counts that or leaves it out."""
    layers = sum(group.layers for group in layout.groups)
    heads = layout.groups[0].planes[0].heads
    whole = {f"{kind}_size": 1 for kind in _KINDS} | {f"{kind}_rank": 0 for kind in _KINDS}
    whole |= {"layer_start": 0, "layer_count": layers, "head_start": 0, "head_count": heads}
    for field, ours in whole.items():
        theirs = getattr(shard, field)
        if theirs not in (0, ours):
            return Mismatch(field, str(ours), str(theirs))
    return None
