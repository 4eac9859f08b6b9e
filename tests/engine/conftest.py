"""What several tests of the engines share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model of each kind, as a Hugging Face folder, by its name."""
    from tests.engine.torch_models import CONFIGS, save_model

    root = tmp_path_factory.mktemp("models")
    return {name: save_model(root / name, config()) for name, config in CONFIGS.items()}
