"""Copying many pieces of memory while other threads of this process run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np

Copy: TypeAlias = tuple[memoryview, memoryview]
"""To and from, bytes of one size."""

PART_BYTES = 1 << 20
"""What a thread copies at a time; less than two such parts are not worth another thread."""
MOST_THREADS = 2
"""More hardly copy faster where one memory controller serves all cores, and the engine has use for
the others."""


def copies(to: Iterable[memoryview], pieces: Iterable[memoryview]) -> Iterator[Copy]:
    """What copies all pieces in order to all of `to` in order, both cut where either ends. Together
    they have one size."""
    sources = (piece.cast("B") for piece in pieces)
    source = memoryview(b"")
    for target in to:
        while target:
            source = source or next(sources)
            size = min(target.nbytes, source.nbytes)
            yield target[:size], source[:size]
            target, source = target[size:], source[size:]


def copy_each(each: Iterable[Copy]) -> None:
    """Copy; no piece is under way any more when it returns."""
    for to, source in each:
        # Unlike the assignment of a memoryview it lets other threads run.
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))


class Copier:
    """Copies with a second thread where there is a core for it."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self._pool = _second_thread() if min(cores, MOST_THREADS) > 1 else None

    def copy(self, each: Iterable[Copy]) -> None:
        """See `copy_each`."""
        if self._pool is None:
            copy_each(each)
            return
        every = list(_cut(each))
        if len(every) < 2:
            copy_each(every)
            return
        # Whoever is done takes the next: the other one may be late, or have a core half the time.
        left = iter(every)
        others = self._pool.submit(copy_each, left)
        try:
            copy_each(left)
        finally:
            # Whatever happens here: who is told that it is over must not be written for any more.
            if not others.cancel():
                others.result()

    def close(self) -> None:
        """End the thread. Nothing is being copied."""
        if self._pool is not None:
            self._pool.shutdown()


def _second_thread() -> ThreadPoolExecutor | None:
    """A thread that runs already; None where the system has none to give. One that is not to be had
    when there is something to copy would fail that, and leave its part behind for the next."""
    pool = ThreadPoolExecutor(1, "pd-shm")
    try:
        pool.submit(int).result()
    except RuntimeError:
        return None
    return pool


def _cut(each: Iterable[Copy]) -> Iterator[Copy]:
    """The same in parts of `PART_BYTES` at the most."""
    for to, source in each:
        for at in range(0, to.nbytes, PART_BYTES):
            yield to[at : at + PART_BYTES], source[at : at + PART_BYTES]
