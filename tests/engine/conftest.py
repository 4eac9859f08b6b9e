"""The packaged model, loaded once for all tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.load import load_engine, load_tokenizer
from pd_grpc.protocol.config import EngineConfig

if TYPE_CHECKING:
    from pd_grpc.engine.torch import TorchEngine


@pytest.fixture(scope="session")
def smollm2_tokenizer(packaged_model: None) -> Tokenizer:
    return load_tokenizer("torch", "smollm2")


@pytest.fixture(scope="session")
def smollm2(packaged_model: None) -> TorchEngine:
    """In float32, with a pool of 128 blocks of 16 tokens."""
    from pd_grpc.engine.torch import TorchEngine

    config = EngineConfig(model="smollm2", dtype="float32", num_blocks=128, threads=1)
    engine = load_engine(config)
    assert isinstance(engine, TorchEngine)
    return engine
