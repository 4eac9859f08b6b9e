"""What of a grant's KV has come: for each layer of each group a byte for each logical block."""

from __future__ import annotations

import re
from typing import TypeAlias

from pd_grpc.protocol.layout import KvLayout
from pd_grpc.v1 import transfer_pb2

LACKING, VERIFIED, UNWANTED = 0, 1, 2
_RUNS = re.compile(bytes([VERIFIED]) + b"+")

Coverage: TypeAlias = list[list[bytearray]]
"""By group and layer, what has become of each logical block."""


def coverage(layout: KvLayout, blocks: int, value: int) -> Coverage:
    """Of so many blocks, each the same."""
    row = bytes([value]) * blocks
    return [[bytearray(row) for _ in range(group.layers)] for group in layout.groups]


def verified_ranges(found: Coverage) -> list[transfer_pb2.KvRange]:
    """The runs of blocks that are verified, a layer at a time."""
    return [
        transfer_pb2.KvRange(
            group=group,
            layer_start=layer,
            layer_count=1,
            block_start=run.start(),
            block_count=run.end() - run.start(),
        )
        for group, rows in enumerate(found)
        for layer, row in enumerate(rows)
        for run in _RUNS.finditer(row)
    ]


def first_lacking(found: Coverage) -> str:
    """For people: the first block that has not come."""
    for group, rows in enumerate(found):
        for layer, row in enumerate(rows):
            if (block := row.find(LACKING)) >= 0:
                return f"group {group}, layer {layer}, block {block} first"
    return ""
