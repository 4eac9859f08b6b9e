"""Engines of one model know each other by its fingerprint, and those of another do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import LlamaConfig

from pd_grpc.engine.torch import TorchEngine
from tests.engine.torch_models import SIZES, load_tiny, save_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> TorchEngine:
    return load_tiny(folders["llama"])


def test_engines_of_the_same_model_agree_on_its_fingerprint(folders: dict[str, Path]) -> None:
    assert load_tiny(folders["llama"]).layout == load_tiny(folders["llama"]).layout


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "model"),
        ({"rms_norm_eps": 1e-3}, "model"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "positions"),
    ],
)
def test_another_model_has_another_fingerprint(
    tmp_path: Path, llama: TorchEngine, change: dict[str, Any], field: str
) -> None:
    options = {k: v for k, v in change.items() if k != "seed"}
    other = save_model(tmp_path, LlamaConfig(**SIZES, **options), change.get("seed", 0))

    fields = [d.field for d in llama.layout.differences(load_tiny(other).layout)]

    assert field in fields


def test_another_dtype_has_another_fingerprint(
    folders: dict[str, Path], llama: TorchEngine
) -> None:
    half = load_tiny(folders["llama"], dtype="bfloat16")

    fields = {d.field for d in llama.layout.differences(half.layout)}

    assert fields == {"model", "groups[0].planes[0].dtype", "groups[0].planes[1].dtype"}
