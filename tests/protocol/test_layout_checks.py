"""A layout that no peer can be told of is refused where it is made, with field and limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pd_grpc.decode.server import start_decode
from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.sim_layouts import sim_layout
from pd_grpc.prefill.server import start_prefill
from pd_grpc.protocol.config import DecodeConfig, EngineConfig, PrefillConfig
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.layout_checks import BadLayout, check_layout, layout_errors

LAYOUT = sim_layout(EngineConfig(sim_layout="sliding-fp8-scale"))


def group(at: int, **change: object) -> KvLayout:
    """LAYOUT with one group changed."""
    groups = list(LAYOUT.groups)
    groups[at] = replace(groups[at], **change)  # type: ignore[arg-type]
    return replace(LAYOUT, groups=tuple(groups))


def plane(at: int, number: int, **change: object) -> KvLayout:
    """LAYOUT with one plane of a group changed."""
    planes = list(LAYOUT.groups[at].planes)
    planes[number] = replace(planes[number], **change)  # type: ignore[arg-type]
    return group(at, planes=tuple(planes))


@pytest.mark.parametrize("name", ["plain", "fp8-scale", "sliding", "sliding-fp8-scale"])
def test_what_the_sim_engine_offers_is_right(name: str) -> None:
    for form in ("canonical", "token-major"):
        config = EngineConfig.model_validate({"sim_layout": name, "sim_format": form})
        assert layout_errors(sim_layout(config)) == []


@pytest.mark.parametrize(
    ("layout", "field", "text"),
    [
        (replace(LAYOUT, block_size=0), "layout.block_size", "0 is not 1 to 1024"),
        (replace(LAYOUT, block_size=1025), "layout.block_size", "1025 is not 1 to 1024"),
        (replace(LAYOUT, format=""), "layout.format", "must have a name"),
        (replace(LAYOUT, groups=()), "layout.groups", "must have at least one"),
        (group(0, kind=GroupKind.LATENT), "layout.groups[0].kind", "LATENT is not built"),
        (group(0, layers=0), "layout.groups[0].layers", "0 is below 1"),
        (group(0, window=8), "layout.groups[0].window", "8 is not 0, only SLIDING has one"),
        (group(1, window=0), "layout.groups[1].window", "0 is below 1, SLIDING needs one"),
        (group(1, planes=()), "layout.groups[1].planes", "must have at least one"),
        (
            plane(1, 0, kind=PlaneKind.STATE),
            "layout.groups[1].planes[0].kind",
            "STATE is not built",
        ),
        (
            plane(0, 1, dtype="float8"),
            "layout.groups[0].planes[1].dtype",
            "'float8' is none of float32, float16, bfloat16, float8_e4m3, int8, uint8",
        ),
        (plane(1, 1, heads=0), "layout.groups[1].planes[1].heads", "0 is below 1"),
        (plane(1, 1, head_dim=0), "layout.groups[1].planes[1].head_dim", "0 is below 1"),
        (
            plane(0, 2, dtype="int8"),
            "layout.groups[0].planes[2].dtype",
            "'int8' is none of float32, float16, bfloat16, of which scales are",
        ),
        (
            plane(0, 2, heads=1),
            "layout.groups[0].planes[2].heads",
            "1 differs from the [2] of the planes K and V",
        ),
        (
            plane(1, 1, kind=PlaneKind.SCALE),
            "layout.groups[1].planes[1].kind",
            "SCALE needs a plane of float8_e4m3, int8, uint8 in its group",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_limit(layout: KvLayout, field: str, text: str) -> None:
    found = layout_errors(layout)
    assert [(error.field, error.description) for error in found] == [(field, text)]
    with pytest.raises(BadLayout) as raised:
        check_layout(layout)
    assert str(raised.value) == f"{field}: {text}"


def test_scales_alone_are_no_group() -> None:
    scale = Plane(PlaneKind.SCALE, "float32", 2, 1)
    wrong = replace(LAYOUT, groups=(KvGroup(GroupKind.FULL, 1, (scale,)),))
    fields = [error.field for error in layout_errors(wrong)]
    assert fields == ["layout.groups[0].planes[0].heads", "layout.groups[0].planes[0].kind"]


class Windowless(SimEngine):
    """Says that its second group slides, and over what it does not say."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        full, sliding = self.layout.groups
        self.layout = replace(self.layout, groups=(full, replace(sliding, window=0)))


def _prefill(engine: Callable[[EngineConfig], SimEngine]) -> object:
    config = PrefillConfig(engine="sim", sim_layout="sliding")
    return start_prefill(config, engine(config))


def _decode(engine: Callable[[EngineConfig], SimEngine]) -> object:
    config = DecodeConfig(engine="sim", sim_layout="sliding")
    return start_decode(config, engine(config))


@pytest.mark.parametrize("start", [_prefill, _decode])
async def test_no_server_starts_over_a_layout_that_is_wrong(start: Callable[..., object]) -> None:
    with pytest.raises(BadLayout, match=r"layout.groups\[1\].window: 0 is below 1"):
        await start(Windowless)  # type: ignore[misc]
