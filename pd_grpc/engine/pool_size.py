"""How many blocks a pool has, and whether they fit into memory, asked before it is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pd_grpc.engine.chunks import cut_of
from pd_grpc.engine.model_error import ModelError
from pd_grpc.protocol.config import EngineConfig

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_STATUS = Path("/proc/self/status")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MIB = 1 << 20
_GIB = 1 << 30
_LEAST_BLOCKS = 2


def available_bytes() -> int:
    """Memory that can be had without swapping: what Linux says is available, less the files that
    this process has mapped, and no more than its cgroup has left; elsewhere all there is.

    Weights are such a file: its pages count as available, and every step needs them."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _kib(_MEMINFO, "MemAvailable")
    if available is not None:
        free = available * 1024
    left = min([free, *_left_in_cgroups(_CGROUPS, _OWN_CGROUP)])
    return max(0, left - (_kib(_OWN_STATUS, "RssFile") or 0) * 1024)


def check_sizes(config: EngineConfig) -> None:
    """ModelError when sizes of `config` exclude each other, whatever the model."""
    if config.chunk_tokens % config.block_size:
        raise ModelError(
            "chunk_tokens",
            f"{config.chunk_tokens} is not a multiple of block_size ({config.block_size})",
        )
    least = config.max_batch + cut_of(config)
    if 0 < config.step_tokens < least:
        raise ModelError(
            "step_tokens",
            f"{config.step_tokens} is less than max_batch ({config.max_batch}) and one cut of a "
            f"prompt ({cut_of(config)}) beside it",
        )
    if not config.pool_gib:
        _check_room(config, "num_blocks", config.num_blocks)
    elif "num_blocks" in config.model_fields_set:
        raise ModelError(
            "pool_gib",
            f"the pool is to have {config.pool_gib:g} GiB, and num_blocks {config.num_blocks} "
            f"blocks; give one of them",
        )


def pool_blocks(
    config: EngineConfig, block_bytes: int, free_bytes: Callable[[], int] = available_bytes
) -> int:
    """How many blocks of `block_bytes` the pool has: `num_blocks`, or what `pool_gib` holds.

    ModelError naming the field when it is too small for max_model_len, or for two blocks, or more
    than memory has room for."""
    if not config.pool_gib:
        check_pool(config.num_blocks, block_bytes, free_bytes=free_bytes)
        return config.num_blocks
    blocks = int(config.pool_gib * _GIB) // block_bytes
    if blocks < _LEAST_BLOCKS:
        raise ModelError(
            "pool_gib",
            f"{config.pool_gib:g} GiB hold {blocks} blocks of {block_bytes} bytes; a pool has at "
            f"least {_LEAST_BLOCKS}, {_LEAST_BLOCKS * block_bytes / _GIB:.3g} GiB",
        )
    _check_room(config, "pool_gib", blocks, block_bytes)
    check_pool(blocks, block_bytes, "pool_gib", free_bytes)
    return blocks


def check_pool(
    num_blocks: int,
    block_bytes: int,
    field: str = "num_blocks",
    free_bytes: Callable[[], int] = available_bytes,
) -> None:
    """ModelError naming `field` when so many blocks are more than memory has room for, of which
    `free_bytes` are there."""
    needed, free = num_blocks * block_bytes, free_bytes()
    if needed > free:
        raise ModelError(
            field,
            f"{num_blocks} blocks of {block_bytes} bytes take {needed // _MIB} MiB; "
            f"{free // _MIB} MiB of memory are available",
        )


def describe_pool(num_blocks: int, block_bytes: int, block_size: int, max_model_len: int) -> str:
    """What a pool holds, in a line for the log."""
    tokens = num_blocks * block_size
    mib = num_blocks * block_bytes / _MIB
    text = f"a pool of {num_blocks} blocks, {mib:.0f} MiB, for {tokens} tokens"
    if tokens < max_model_len:
        text += f", fewer than the {max_model_len} that a request may have: longer ones are refused"
    return text


def _kib(file: Path, wanted: str) -> int | None:
    """The value of a line such as `MemAvailable:  123 kB`; None where there is no such line."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0])
    return None


class _Cgroup(NamedTuple):
    """The files of a memory cgroup, and the line of its memory.stat for files that nobody has used
    for a while, its children's too."""

    limit: str
    used: str
    inactive: str


_V2 = _Cgroup("memory.max", "memory.current", "inactive_file")
_V1 = _Cgroup("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left_in_cgroups(root: Path, own: Path) -> list[int]:
    """What each cgroup above the process that has a limit has left, in bytes."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            files, top = _V2, root
        elif "memory" in controllers.split(","):
            files, top = _V1, root / "memory"
        else:
            continue
        folder = top / path.lstrip("/")
        for level in (folder, *folder.parents):
            if level == top.parent:
                break
            found += _left_in(level, files)
    return found


def _left_in(cgroup: Path, files: _Cgroup) -> list[int]:
    try:
        limit = (cgroup / files.limit).read_text(encoding="ascii").strip()
        used = int((cgroup / files.used).read_text(encoding="ascii"))
        stat = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    if limit == "max":
        return []
    # Files that nobody has used for a while make room before anything else does.
    cached = sum(int(line.split()[1]) for line in stat if line.startswith(f"{files.inactive} "))
    return [max(0, int(limit) - used + cached)]


def _check_room(config: EngineConfig, field: str, blocks: int, block_bytes: int = 0) -> None:
    room = blocks * config.block_size
    if config.max_model_len <= room:
        return
    text = (
        f"{blocks} blocks of {config.block_size} hold {room} tokens, fewer than "
        f"max_model_len ({config.max_model_len})"
    )
    if block_bytes:
        least = -(-config.max_model_len // config.block_size) * block_bytes / _GIB
        text += f"; that takes {least:.3g} GiB"
    raise ModelError(field, text)
