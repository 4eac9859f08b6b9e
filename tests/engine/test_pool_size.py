"""A pool that memory has no room for is refused before it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from pd_grpc.engine import pool_size
from pd_grpc.engine.load import ModelError, load_engine
from pd_grpc.engine.pool_size import available_bytes, check_pool, check_sizes, pool_blocks
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


def test_a_cgroup_with_a_limit_bounds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = available_bytes()
    pod = tmp_path / "kube" / "pod"
    pod.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/kube/pod\n")
    monkeypatch.setattr(pool_size, "_CGROUPS", tmp_path)
    monkeypatch.setattr(pool_size, "_OWN_CGROUP", own)
    (pod / "memory.max").write_text("max\n")
    (pod / "memory.current").write_text("5000\n")
    (pod / "memory.stat").write_text("anon 3000\ninactive_file 1000\n")
    assert available_bytes() > whole // 2

    # The process's own group has none; the one above it has.
    (pod.parent / "memory.max").write_text(f"{1 << 30}\n")
    (pod.parent / "memory.current").write_text(f"{(1 << 30) - 5000}\n")
    (pod.parent / "memory.stat").write_text("anon 3000\ninactive_file 1000\n")

    monkeypatch.setattr(pool_size, "_OWN_STATUS", tmp_path / "none")
    assert available_bytes() == 6000
    (tmp_path / "status").write_text("Name:\tpython\nRssFile:\t    4 kB\n")
    monkeypatch.setattr(pool_size, "_OWN_STATUS", tmp_path / "status")
    assert available_bytes() == 6000 - 4096
    with pytest.raises(ModelError, match="2 blocks of 4096 bytes take 0 MiB; 0 MiB of memory are"):
        check_pool(2, 4096)


V2_STAT = """anon 12288
file 8192
kernel 4096
inactive_anon 0
active_anon 12288
inactive_file 2048
active_file 6144
workingset_refault_file 700
"""
V1_STAT = """cache 8192
rss 12288
mapped_file 0
inactive_anon 0
active_anon 12288
inactive_file 512
active_file 6144
hierarchical_memory_limit 1073741824
total_cache 8192
total_rss 12288
total_inactive_file 2048
total_active_file 6144
"""
V2 = ("0::{}\n", "", "memory.max", "memory.current", V2_STAT, "max\n")
V1 = (
    "11:cpuset:/\n9:hugetlb,memory:{}\n3:cpu,cpuacct:/pod\n0::/\n",
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    V1_STAT,
    f"{(1 << 63) - 4096}\n",
)


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("path", ["/kube/pod", "/", "/as/the/host/calls/it"])
def test_the_page_cache_of_a_cgroup_that_nobody_uses_is_room(
    version: tuple[str, ...], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit stands at the top, as a container sees it, whatever its own group is called."""
    of_process, top, limit, used, stat, unlimited = version
    own = tmp_path / "own"
    own.write_text(of_process.format(path))
    root = tmp_path / "cgroup"
    for folder, bytes_allowed in (
        (root / top / "kube" / "pod", unlimited),
        (root / top, f"{1 << 20}\n"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(bytes_allowed)
        (folder / used).write_text(f"{(1 << 20) - 5000}\n")
        (folder / "memory.stat").write_text(stat)
    monkeypatch.setattr(pool_size, "_CGROUPS", root)
    monkeypatch.setattr(pool_size, "_OWN_CGROUP", own)
    monkeypatch.setattr(pool_size, "_OWN_STATUS", tmp_path / "none")
    assert available_bytes() == 5000 + 2048


def test_a_pool_of_gib_has_as_many_blocks_as_fit_in() -> None:
    config = EngineConfig(pool_gib=0.5)

    assert pool_blocks(config, 1 << 20) == 512
    assert pool_blocks(config, (1 << 20) + 1) == 511
    assert pool_blocks(EngineConfig(num_blocks=7), 1 << 20) == 7


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"pool_gib": 1.0, "num_blocks": 1024}, "pool_gib", "1 GiB, and num_blocks 1024 blocks"),
        ({"num_blocks": 3, "max_model_len": 49}, "num_blocks", "hold 48 tokens, fewer than"),
        ({"chunk_tokens": 17}, "chunk_tokens", "not a multiple of block_size"),
        ({"step_tokens": 159}, "step_tokens", "less than max_batch (32) and one cut of a prompt"),
    ],
)
def test_sizes_that_exclude_each_other_are_refused(
    options: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(ModelError) as caught:
        check_sizes(EngineConfig(**options))

    assert caught.value.field == field and says in caught.value.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pool_gib": 0.001}, "hold 1 blocks of 1048576 bytes; a pool has at least 2, 0.00195 GiB"),
        (
            {"pool_gib": 0.01, "max_model_len": 170},
            "10 blocks of 16 hold 160 tokens, fewer than max_model_len (170); that takes 0.0107",
        ),
        ({"pool_gib": 1e6}, "blocks of 1048576 bytes take 1024000000 MiB; "),
    ],
)
def test_a_pool_of_gib_that_is_too_small_or_too_large_is_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError) as caught:
        pool_blocks(EngineConfig(**options), 1 << 20)

    assert caught.value.field == "pool_gib" and says in caught.value.message


@pytest.mark.parametrize("gib", [1e300, float("inf"), float("nan"), -1.0])
def test_a_budget_that_is_no_size_is_refused_by_name(gib: float) -> None:
    with pytest.raises(ValidationError, match="pool_gib"):
        EngineConfig(pool_gib=gib)


def test_the_sim_engine_takes_it_in_gib_and_says_what_it_holds() -> None:
    stages: list[str] = []
    config = EngineConfig(engine="sim", pool_gib=0.001, block_size=16)

    engine = load_engine(config, stages.append)

    blocks = engine.memory.num_blocks
    assert blocks == int(0.001 * (1 << 30)) // engine.layout.block_bytes
    assert stages[-1].startswith(f"making a pool of {blocks} blocks, 1 MiB, for {16 * blocks} tok")
    assert "longer ones are refused" in stages[-1]
    # The ranks' own memory is beside a copy of the whole.
    parts = load_engine(EngineConfig(engine="sim", pool_gib=0.001, tp=2))
    assert parts.memory.num_blocks == blocks // 2


def test_the_sim_engine_refuses_it() -> None:
    with pytest.raises(ModelError, match="num_blocks: 99999999999 blocks of 2048 bytes"):
        load_engine(EngineConfig(engine="sim", num_blocks=99999999999))


def test_the_torch_engine_refuses_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.engine.torch_models import SIZES, save_model

    model = save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    with pytest.raises(ModelError, match="num_blocks: 99999999999 blocks of"):
        load_engine(EngineConfig(model=str(model), num_blocks=99999999999))
    with pytest.raises(ModelError, match=r"pool_gib: \d+ blocks of"):
        load_engine(EngineConfig(model=str(model), pool_gib=1e9))
    engine = load_engine(EngineConfig(model=str(model), pool_gib=0.001))
    assert engine.memory.num_blocks == int(0.001 * (1 << 30)) // engine.layout.block_bytes
