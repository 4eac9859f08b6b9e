"""Filling a forward pass up with rows, so that a row's bits do not depend on how many there are.

A matrix product takes another routine for its last one to three rows than for whole groups of four
(or two, or eight: it is the library's choice, and the threads'), and the routines sum in another
order. A request alone and the same request in a batch then differ in the last bits, and once in a
while in a token. With a number of rows that is a multiple of the group the routine is always the
same. The group is measured, once per model, on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pd_grpc.engine.packed_linear import Linear

_GROUPS = (1, 2, 4, 8)
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 9, 12, 16)
_MOST_ROWS = 48
_LONG_CHUNKS = (260, 500)
_SMALL_LAYER = 1 << 22


def steady_group(linears: Iterable[Linear]) -> int:
    """The least group (1, 2, 4 or 8) such that every one of `linears` gives a row the same bits in
    any multiple of it; 1 when there is none."""
    layers = list({(x.in_features, x.out_features, x.has_bias): x for x in linears}.values())
    with torch.inference_mode():
        for group in _GROUPS:
            if all(_steady(layer, group) for layer in layers):
                return group
    return 1


def filled(rows: int, group: int) -> int:
    """The least multiple of `group` that is at least `rows`."""
    return -(-rows // group) * group


def _steady(layer: Linear, group: int) -> bool:
    counts = list(_row_counts(layer, group))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(counts), layer.in_features, generator=generator).to(
        layer.device, layer.dtype
    )
    known = layer(rows[:group])
    for count in counts:
        out = layer(rows[:count])
        if not torch.equal(out[: len(known)], known[:count]):
            return False
        known = out if count > len(known) else known
    return True


def _row_counts(layer: Linear, group: int) -> Iterator[int]:
    yield from (count * group for count in _COUNTS if count * group <= _MOST_ROWS)
    # The product with the vocabulary is dear, and never has the rows of a whole chunk.
    if layer.in_features * layer.out_features <= _SMALL_LAYER:
        yield from (filled(count, group) for count in _LONG_CHUNKS)
