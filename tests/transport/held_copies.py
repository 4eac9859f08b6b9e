"""Threads of P's that hang in the middle of copying KV into D's pool."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from pd_grpc.transport.shm.copy_queue import Copy
from pd_grpc.transport.shm.copying import copy_each

LIMIT_S = 60.0


class Held:
    """In the place of `copying.copy_each`: so many `threads` wait before their first part, and may
    raise an `error` after it. The loop, which copies as well, is never held."""

    def __init__(self, threads: int, error: Exception | None = None) -> None:
        self.release = threading.Event()
        self.under_way = 0
        """Parts that are held."""
        self._began = threading.Semaphore(0)
        self._left = self._threads = threads
        self._lock = threading.Lock()
        self._error = error

    def began(self) -> None:
        """Wait until every one is held. Blocks."""
        for _ in range(self._threads):
            assert self._began.acquire(timeout=LIMIT_S)

    def __call__(self, each: Iterable[Copy]) -> None:
        if not self._holds():
            copy_each(each)
            return
        self._began.release()
        assert self.release.wait(LIMIT_S)
        copy_each(each)
        with self._lock:
            self.under_way -= 1
        if self._error is not None:
            raise self._error

    def _holds(self) -> bool:
        with self._lock:
            if not threading.current_thread().name.startswith("pd-shm") or not self._left:
                return False
            self._left -= 1
            self.under_way += 1
            return True
