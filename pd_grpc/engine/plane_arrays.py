"""A layer of a block as arrays, one for each plane, whatever the order of its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pd_grpc.protocol.layout import DTYPE_BYTES, KvGroup

_Array = npt.NDArray[Any]


def plane_arrays(
    layers: _Array, group: KvGroup, block_size: int, token_major: bool
) -> list[_Array]:
    """Views of `layers`, whose last axis is the bytes of one layer of a block: for each plane one
    of shape `(..., heads, block_size, row)` with the bytes of a head and token as a row.

    The order of the bytes is canonical (plane -> head -> token), or `token_major`: token -> plane
    -> head.
    """
    lead = layers.shape[:-1]
    found, at = [], 0
    for plane in group.planes:
        row = plane.head_dim * DTYPE_BYTES[plane.dtype]
        size = plane.token_bytes
        if token_major:
            rows = layers.reshape(*lead, block_size, group.token_bytes)[..., at : at + size]
            view = rows.reshape(*lead, block_size, plane.heads, row).swapaxes(-3, -2)
            at += size
        else:
            rows = layers[..., at : at + size * block_size]
            view = rows.reshape(*lead, plane.heads, block_size, row)
            at += size * block_size
        found.append(view)
    return found


def canonical_order(group: KvGroup, block_size: int) -> npt.NDArray[np.intp]:
    """Where each byte of a canonical layer of a block lies in a token-major one."""
    places = np.arange(group.token_bytes * block_size, dtype=np.intp)
    planes = plane_arrays(places, group, block_size, token_major=True)
    return np.concatenate([plane.reshape(-1) for plane in planes])
