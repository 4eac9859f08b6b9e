"""What of a grant's KV has come on the streams of one sender: for each layer that they bring a byte
for each logical block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.shards import Part
from pd_grpc.v1 import transfer_pb2

LACKING, VERIFIED, UNWANTED = 0, 1, 2
_RUNS = re.compile(bytes([VERIFIED]) + b"+")

Coverage: TypeAlias = list[list[bytearray]]
"""By group and layer, what has become of each logical block; of layers that do not come nothing."""


def coverage(layout: KvLayout, part: Part, blocks: int, value: int) -> Coverage:
    """Of so many blocks of the layers of `part`, each the same."""
    row = bytes([value]) * blocks
    found: Coverage = [[bytearray() for _ in range(group.layers)] for group in layout.groups]
    for group, layer, layers in part.runs(layout):
        found[group][layer : layer + layers] = [bytearray(row) for _ in range(layers)]
    return found


def wanted_of(
    layout: KvLayout, part: Part, blocks: int, wanted: Sequence[tuple[int, int]]
) -> tuple[Coverage, int]:
    """Of so many blocks the runs (start, count) `wanted` lacking in the layers of `part`, the
    others unwanted; and how many that are."""
    found, lacking = coverage(layout, part, blocks, UNWANTED), 0
    for group, layer, layers in part.runs(layout):
        for row in found[group][layer : layer + layers]:
            for start, count in wanted:
                row[start : start + count] = bytes([LACKING]) * count
            lacking += row.count(LACKING)
    return found, lacking


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
