"""A pool that memory has no room for is refused before it is made."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pd_grpc.engine.load import ModelError, load_engine
from pd_grpc.engine.pool_size import available_bytes, check_pool
from pd_grpc.protocol.config import EngineConfig


def test_what_is_available_is_what_the_system_says() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_a_pool_as_large_as_memory_is_refused_with_both_sizes() -> None:
    blocks = psutil.virtual_memory().total // 4096 + 1
    with pytest.raises(
        ModelError, match=rf"num_blocks: {blocks} blocks of 4096 bytes take \d+ MiB; "
    ):
        check_pool(blocks, 4096)
    check_pool(1, 4096)


def test_the_sim_engine_refuses_it() -> None:
    with pytest.raises(ModelError, match="num_blocks: 99999999999 blocks of 2048 bytes"):
        load_engine(EngineConfig(engine="sim", num_blocks=99999999999))


def test_the_torch_engine_refuses_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.engine.torch_models import SIZES, save_model

    model = save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    with pytest.raises(ModelError, match="num_blocks: 99999999999 blocks of"):
        load_engine(EngineConfig(model=str(model), num_blocks=99999999999))
