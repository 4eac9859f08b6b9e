"""Large buffers are not given back to the kernel after each message."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pd_grpc.servers.allocator import KEPT_BYTES, OLDER_GLIBC_MOST_BYTES, keep_freed_memory

FAULTS = """
import resource, sys
from pd_grpc.servers.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
first = bytes(8 << 20), b"x" * (8 << 20)
del first
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    b"x" * (64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that fault while a process uses 20 large buffers one after another."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_with_glibc_buffers_are_used_again() -> None:
    assert faults("kept") * 5 < faults("default")


def test_without_mallopt_nothing_happens() -> None:
    assert not keep_freed_memory(SimpleNamespace())


def test_an_older_glibc_is_told_the_most_it_takes() -> None:
    told = []

    def mallopt(option: int, value: int) -> int:
        told.append((option, value))
        return int(option != -3 or value <= OLDER_GLIBC_MOST_BYTES)

    assert keep_freed_memory(SimpleNamespace(mallopt=mallopt))
    assert told == [
        (-3, KEPT_BYTES),
        (-3, OLDER_GLIBC_MOST_BYTES),
        (-8, 1),
        (-1, KEPT_BYTES),
    ]


def test_a_library_that_refuses_is_left_as_it_is() -> None:
    assert not keep_freed_memory(SimpleNamespace(mallopt=lambda option, value: 0))
