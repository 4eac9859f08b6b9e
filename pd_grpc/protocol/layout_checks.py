"""Whether a layout of one's own is one that the protocol can carry."""

from __future__ import annotations

from pd_grpc.protocol.layout import (
    BUILT_GROUPS,
    BUILT_PLANES,
    DTYPE_BYTES,
    GroupKind,
    KvGroup,
    KvLayout,
    Plane,
    PlaneKind,
)
from pd_grpc.protocol.sampling import FieldError

MAX_BLOCK_TOKENS = 1024
QUANTIZED = ("float8_e4m3", "int8", "uint8")
SCALES = ("float32", "float16", "bfloat16")


class BadLayout(ValueError):
    """A layout that no peer can be told of; the message names each field and its limit."""


def check_layout(layout: KvLayout) -> None:
    """BadLayout when anything is wrong with it."""
    wrong = layout_errors(layout)
    if wrong:
        raise BadLayout("; ".join(f"{error.field}: {error.description}" for error in wrong))


def layout_errors(layout: KvLayout) -> list[FieldError]:
    """What is wrong with a layout, in reading order, as layout.proto has it. What another's layout
    has wrong shows where it differs from one that is right."""
    wrong = []
    if not 1 <= layout.block_size <= MAX_BLOCK_TOKENS:
        text = f"{layout.block_size} is not 1 to {MAX_BLOCK_TOKENS}"
        wrong.append(FieldError("layout.block_size", text))
    if not layout.format:
        wrong.append(FieldError("layout.format", "must have a name"))
    if not layout.groups:
        wrong.append(FieldError("layout.groups", "must have at least one"))
    for g, group in enumerate(layout.groups):
        wrong += _group_errors(f"layout.groups[{g}]", group)
    return wrong


def _group_errors(path: str, group: KvGroup) -> list[FieldError]:
    wrong = []
    if group.kind not in BUILT_GROUPS:
        wrong.append(FieldError(f"{path}.kind", f"{group.kind.name} is not built"))
    if group.layers < 1:
        wrong.append(FieldError(f"{path}.layers", f"{group.layers} is below 1"))
    if group.kind is GroupKind.SLIDING and group.window < 1:
        wrong.append(FieldError(f"{path}.window", f"{group.window} is below 1, SLIDING needs one"))
    if group.kind is not GroupKind.SLIDING and group.window:
        wrong.append(FieldError(f"{path}.window", f"{group.window} is not 0, only SLIDING has one"))
    if not group.planes:
        wrong.append(FieldError(f"{path}.planes", "must have at least one"))
    for p, plane in enumerate(group.planes):
        wrong += _plane_errors(f"{path}.planes[{p}]", plane)
        if plane.kind is PlaneKind.SCALE:
            wrong += _scale_errors(f"{path}.planes[{p}]", plane, group)
    return wrong


def _plane_errors(path: str, plane: Plane) -> list[FieldError]:
    wrong = []
    if plane.kind not in BUILT_PLANES:
        wrong.append(FieldError(f"{path}.kind", f"{plane.kind.name} is not built"))
    if plane.dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        wrong.append(FieldError(f"{path}.dtype", f"{plane.dtype!r} is none of {known}"))
    for name in ("heads", "head_dim"):
        if getattr(plane, name) < 1:
            wrong.append(FieldError(f"{path}.{name}", f"{getattr(plane, name)} is below 1"))
    return wrong


def _scale_errors(path: str, scale: Plane, group: KvGroup) -> list[FieldError]:
    wrong = []
    if scale.dtype not in SCALES:
        text = f"{scale.dtype!r} is none of {', '.join(SCALES)}, of which scales are"
        wrong.append(FieldError(f"{path}.dtype", text))
    scaled = [plane for plane in group.planes if plane.kind is not PlaneKind.SCALE]
    heads = sorted({plane.heads for plane in scaled})
    if heads != [scale.heads]:
        text = f"{scale.heads} differs from the {heads} of the planes K and V"
        wrong.append(FieldError(f"{path}.heads", text))
    if not any(plane.dtype in QUANTIZED for plane in scaled):
        text = f"SCALE needs a plane of {', '.join(QUANTIZED)} in its group"
        wrong.append(FieldError(f"{path}.kind", text))
    return wrong
