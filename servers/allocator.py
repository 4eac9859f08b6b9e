"""How the process keeps its memory."""

from __future__ import annotations

import ctypes
from typing import Any

KEPT_BYTES = 1 << 30
OLDER_GLIBC_MOST_BYTES = 32 << 20
"""Older versions take no larger M_MMAP_THRESHOLD on 64 bits: DEFAULT_MMAP_THRESHOLD_MAX in
mallopt(3)."""

# From glibc's malloc.h; mallopt(3) describes them.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def keep_freed_memory(library: Any = None) -> bool:
    """Let malloc keep what large buffers leave behind, up to 1 GiB, for the next ones.

    glibc otherwise maps a buffer of a KV chunk's size anew for each message and gives it back
    after, so that every page of every message faults; `benchmarks/inline_codec.py` measures what it
    costs. What is kept is kept in one arena: glibc otherwise gives threads their own, and each
    keeps the most it has had. After the third transfer of 256 MiB a D held 52 MiB beyond its pool
    in place of 18 (the legs of `pd-grpc bench kv`).

    Returns whether the C library, or `library` in its place, does as it is told; one that is not
    glibc knows no mallopt and is left as it is.
    """
    try:
        mallopt = (library or ctypes.CDLL(None)).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    sizes = (KEPT_BYTES, OLDER_GLIBC_MOST_BYTES)
    mapped = any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in sizes)
    in_one = mallopt(_M_ARENA_MAX, 1) == 1
    return mapped and in_one and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES) == 1
