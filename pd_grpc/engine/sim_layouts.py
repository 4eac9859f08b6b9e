"""The layouts that the sim engine offers."""

from __future__ import annotations

from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.layout import (
    CANONICAL,
    GroupKind,
    KvGroup,
    KvLayout,
    Plane,
    PlaneKind,
)

CHAIN_BYTES = 16
"""Of the hash that plane K of layer 0 begins with."""

TOKEN_MAJOR = "sim-token-major"
"""The format in which a layer of a block is token -> plane -> head -> dimension."""


def sim_layout(config: EngineConfig) -> KvLayout:
    """The layout of the sim model; ValueError when layer 0 has no room for the chain."""
    if config.sim_heads * config.sim_head_dim < CHAIN_BYTES:
        raise ValueError(
            f"sim_head_dim: sim_heads * sim_head_dim is {config.sim_heads * config.sim_head_dim}, "
            f"it takes {CHAIN_BYTES} at least"
        )
    scaled = config.sim_layout in ("fp8-scale", "sliding-fp8-scale")
    planes = _keys_and_values("float8_e4m3" if scaled else "uint8", config.sim_heads, config)
    if scaled:
        planes = (*planes, Plane(PlaneKind.SCALE, "float32", config.sim_heads, 2))
    groups = [KvGroup(GroupKind.FULL, config.sim_layers, planes)]
    if config.sim_layout in ("sliding", "sliding-fp8-scale"):
        wide = _keys_and_values("bfloat16", 2 * config.sim_heads, config)
        groups.append(
            KvGroup(GroupKind.SLIDING, config.sim_layers + 1, wide, window=config.sim_window)
        )
    return KvLayout(
        model=f"sim-v1/vocab={config.sim_vocab}",
        positions="sim",
        block_size=config.block_size,
        groups=tuple(groups),
        format=TOKEN_MAJOR if config.sim_format == "token-major" else CANONICAL,
    )


def _keys_and_values(dtype: str, heads: int, config: EngineConfig) -> tuple[Plane, ...]:
    return tuple(
        Plane(kind, dtype, heads, config.sim_head_dim) for kind in (PlaneKind.K, PlaneKind.V)
    )
