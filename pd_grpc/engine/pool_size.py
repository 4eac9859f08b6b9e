"""Whether a pool fits into memory, asked before it is made."""

from __future__ import annotations

import os
from pathlib import Path

from pd_grpc.engine.model_error import ModelError

_MEMINFO = Path("/proc/meminfo")
_MIB = 1 << 20


def check_pool(num_blocks: int, block_bytes: int) -> None:
    """ModelError naming num_blocks when so many blocks are more than memory has room for."""
    needed, free = num_blocks * block_bytes, available_bytes()
    if needed > free:
        raise ModelError(
            "num_blocks",
            f"{num_blocks} blocks of {block_bytes} bytes take {needed // _MIB} MiB; "
            f"{free // _MIB} MiB of memory are available",
        )


def available_bytes() -> int:
    """Memory that can be had without swapping: what Linux says is available, elsewhere all there
    is."""
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
