"""Copying memory on threads that do nothing else, while the loop that asks for it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np

from pd_grpc.transport.shm.copy_queue import Copy, CopyQueue, Job

MOST_THREADS = 2
"""More hardly copy faster where one memory controller serves all cores, and the engine has use for
the others."""


def copy_each(each: Iterable[Copy]) -> None:
    """Copy; no piece is under way any more when it returns."""
    for to, source in each:
        # Unlike the assignment of a memoryview it lets other threads run.
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))


class Copying:
    """A slab that is being copied, or waits for its turn. To be made on the loop that asks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self.loop.create_future()
        """Done when no byte of it is read or written any more, nor will be; with the error if it
        failed."""

    @property
    def copied(self) -> bool:
        """Of one that is over: whether all of it was copied. It was not if it failed or was
        stopped."""
        return self.job.whole


class Copier:
    """Copies by up to `MOST_THREADS` threads, as many as there are cores and the system has to
    give; without any it is the loop that copies. They are there from the first slab on. To be used
    on one loop.

    Which part is next, and which slab is over, its queue says; here are the threads and the lock.
    Whoever has copied a part lets go of the views of it before it says so.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._queue = CopyQueue()
        self._under_way: dict[Job, Copying] = {}
        self._threads: list[ThreadPoolExecutor] | None = None
        self._asleep: list[ThreadPoolExecutor] = []

    def start(self, owner: Hashable, each: Iterable[Copy]) -> Copying:
        """Have a slab copied, after those that `owner` has started before. Where no thread is at
        work the loop copies a part of it: a slab of one part so needs no other thread, and of a
        larger one they get Python's lock at once, which the loop would keep."""
        copying = Copying(Job(owner, each))
        job = copying.job
        if job.over:
            copying.over.set_result(None)
            return copying
        if self._threads is None:
            self._threads = _threads()
            self._asleep = list(self._threads)
        self._under_way[job] = copying
        with self._lock:
            helps = len(self._asleep) == len(self._threads)
            self._queue.add(job)
            waking = self._asleep[: len(job.left) - helps]
            del self._asleep[: len(waking)]
        for thread in waking:
            thread.submit(self._work, thread)
        if helps:
            self._copy_part()
        if not self._threads:
            while self._copy_part():
                pass
        return copying

    async def stop(self, copyings: Iterable[Copying]) -> None:
        """Begin no more of these. When it returns nothing of them is read or written any more."""
        stopped = list(copyings)
        with self._lock:
            over = [each.job for each in stopped if self._queue.stop(each.job)]
        for job in over:
            self._end(job)
        if waiting := [each.over for each in stopped if not each.over.done()]:
            await asyncio.wait(waiting)

    def close(self) -> None:
        """End the threads. Nothing is being copied."""
        for thread in self._threads or ():
            thread.shutdown()

    def _work(self, thread: ThreadPoolExecutor) -> None:
        """On a thread of ours, until nothing is left to copy."""
        while self._copy_part(thread):
            pass

    def _copy_part(self, thread: ThreadPoolExecutor | None = None) -> bool:
        """Copy the next part; False when there is none, and `thread` is asleep from then on."""
        with self._lock:
            taken = self._queue.take()
            if taken is None:
                if thread is not None:
                    self._asleep.append(thread)
                return False
        job, part = taken
        error = None
        try:
            copy_each(part)
        except Exception as raised:  # noqa: BLE001 - whoever waits for the slab is told
            # What it went through on its way here has views of the memory.
            error = raised.with_traceback(None)
        del taken, part
        with self._lock:
            over = self._queue.done(job, error)
        # It is not known any more where the loop has stopped it meanwhile.
        if over and (copying := self._under_way.get(job)):
            copying.loop.call_soon_threadsafe(self._end, job)
        return True

    def _end(self, job: Job) -> None:
        """On the loop: a job is over."""
        copying = self._under_way.pop(job, None)
        if copying is None:
            return
        if job.error is None:
            copying.over.set_result(None)
        else:
            copying.over.set_exception(job.error)


def _threads() -> list[ThreadPoolExecutor]:
    """Each keeps to cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    count = min(len(cores), MOST_THREADS)
    made = (_thread(set(cores[i::count])) for i in range(count))
    return [thread for thread in made if thread is not None]


def _thread(cores: set[int]) -> ThreadPoolExecutor | None:
    """A thread that runs already, and keeps to `cores`; None where the system has none to give. One
    that is not to be had when there is something to copy would fail that."""
    pool = ThreadPoolExecutor(1, "pd-shm")
    try:
        pool.submit(_keep_to, cores).result()
    except RuntimeError:
        return None
    return pool


def _keep_to(cores: set[int]) -> None:
    """Two that wake up together on busy cores are put on one, and stay there for as long as a slab
    takes."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
