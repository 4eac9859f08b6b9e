"""The shape of KV bytes: which groups, layers and planes a block has, and where each byte lies.

The canonical order of a block is normative (`protos/pd_grpc/v1/layout.proto`): little-endian,
without padding, group -> layer -> plane -> head -> token -> dimension.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

CANONICAL = "canonical"

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "int8": 1, "uint8": 1}
"""Bytes of one element of each dtype a plane may have."""


class GroupKind(enum.Enum):
    """What attention a group of layers runs; those not in BUILT_GROUPS are reserved."""

    FULL = 1
    SLIDING = 2
    LATENT = 3
    STATE = 4
    DRAFT = 5
    INDEX = 6


class PlaneKind(enum.Enum):
    """What a plane holds; those not in BUILT_PLANES are reserved."""

    K = 1
    V = 2
    LATENT = 3
    SCALE = 4
    STATE = 5


BUILT_GROUPS = (GroupKind.FULL, GroupKind.SLIDING)
BUILT_PLANES = (PlaneKind.K, PlaneKind.V, PlaneKind.SCALE)


@dataclass(frozen=True)
class Plane:
    """One tensor per token and layer, `(heads, head_dim)` elements of `dtype`."""

    kind: PlaneKind
    dtype: str
    heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KvGroup:
    """`layers` consecutive layers that share a shape and an attention kind.

    `window` is the attention window in tokens; 0 for the groups that have none. However short it
    is, a block has the KV of all its tokens.
    """

    kind: GroupKind
    layers: int
    planes: tuple[Plane, ...]
    window: int = 0

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, all planes. Each chunk asks for it several times."""
        return sum(plane.token_bytes for plane in self.planes)


@dataclass(frozen=True)
class Mismatch:
    """One field in which two layouts differ."""

    field: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class KvLayout:
    """The KV cache of one model, as both ends must agree on it.

    `model` is a fingerprint of the weights and architecture, `positions` a digest of the position
    encoding, `block_size` the tokens of a block, `format` the packing of a block's bytes.
    """

    model: str
    positions: str
    block_size: int
    groups: tuple[KvGroup, ...]
    format: str = CANONICAL

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all groups, layers and planes."""
        return sum(self.layer_bytes(g) * group.layers for g, group in enumerate(self.groups))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all groups, layers and planes."""
        return self.block_bytes // self.block_size

    def layer_bytes(self, group: int) -> int:
        """Bytes of one block in one layer of `group`."""
        return self.groups[group].token_bytes * self.block_size

    def layer_offset(self, group: int, layer: int) -> int:
        """Where layer `layer` (counted within `group`) begins in a block, in bytes."""
        before = sum(self.layer_bytes(g) * self.groups[g].layers for g in range(group))
        return before + layer * self.layer_bytes(group)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def differences(self, theirs: KvLayout) -> list[Mismatch]:
        """The fields in which two layouts differ, in reading order; empty when they are equal but
        for their formats, between which the ends convert."""
        found = [
            Mismatch(name, str(getattr(self, name)), str(getattr(theirs, name)))
            for name in ("model", "positions", "block_size")
            if getattr(self, name) != getattr(theirs, name)
        ]
        if len(self.groups) != len(theirs.groups):
            found.append(Mismatch("groups", str(len(self.groups)), str(len(theirs.groups))))
            return found
        for g, (a, b) in enumerate(zip(self.groups, theirs.groups, strict=True)):
            found += _group_differences(f"groups[{g}]", a, b)
        return found


def _group_differences(path: str, ours: KvGroup, theirs: KvGroup) -> list[Mismatch]:
    found = []
    for name in ("kind", "layers", "window"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            found.append(Mismatch(f"{path}.{name}", _show(a), _show(b)))
    if len(ours.planes) != len(theirs.planes):
        found.append(Mismatch(f"{path}.planes", str(len(ours.planes)), str(len(theirs.planes))))
        return found
    for p, (a, b) in enumerate(zip(ours.planes, theirs.planes, strict=True)):
        for name in ("kind", "dtype", "heads", "head_dim"):
            x, y = getattr(a, name), getattr(b, name)
            if x != y:
                found.append(Mismatch(f"{path}.planes[{p}].{name}", _show(x), _show(y)))
    return found


def _show(value: object) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)
