"""Which bytes are copied next, and when what belongs together has been: no thread, no lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeAlias

Copy: TypeAlias = tuple[memoryview, memoryview]
"""To and from, bytes of one size."""

PART_BYTES = 2 << 20
"""What a thread copies in a turn. Less would have it take Python's lock more often, which others of
the process may hold; more would keep who stops waiting for longer."""


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


def parts(each: Iterable[Copy]) -> Iterator[list[Copy]]:
    """The same in parts of `PART_BYTES`, the last of which may have less."""
    part: list[Copy] = []
    room = PART_BYTES
    for to, source in each:
        while to.nbytes >= room:
            part.append((to[:room], source[:room]))
            to, source = to[room:], source[room:]
            yield part
            part, room = [], PART_BYTES
        if to:
            part.append((to, source))
            room -= to.nbytes
    if part:
        yield part


class Job:
    """A slab that is copied for `owner`. It is over when no part of it is left and none is under
    way; a part that fails is its last."""

    def __init__(self, owner: Hashable, each: Iterable[Copy]) -> None:
        self.owner = owner
        self.left = deque(parts(each))
        self.under_way = 0
        self.stopped = False
        self.error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether nothing of it is being copied, nor will be."""
        return not self.left and not self.under_way

    @property
    def whole(self) -> bool:
        """Of one that is over: whether all of it was copied."""
        return not self.stopped and self.error is None


class CopyQueue:
    """Jobs that wait. Their owners take turns, a part in each: eight transfers that begin together
    end one soon after the other. Jobs of one owner are copied in order."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, deque[Job]] = {}
        """By owner, in the order of their turns; all have parts left."""

    def add(self, job: Job) -> None:
        """Have it copied, unless there is nothing to copy."""
        if job.left:
            self._jobs.setdefault(job.owner, deque()).append(job)

    def take(self) -> tuple[Job, list[Copy]] | None:
        """The next part, which is under way until `done`; None when nothing waits."""
        if not self._jobs:
            return None
        owner = next(iter(self._jobs))
        jobs = self._jobs.pop(owner)
        job = jobs[0]
        part = job.left.popleft()
        job.under_way += 1
        if not job.left:
            jobs.popleft()
        if jobs:
            self._jobs[owner] = jobs
        return job, part

    def done(self, job: Job, error: Exception | None = None) -> bool:
        """A part that was taken is not copied any more; whether its job is over."""
        job.under_way -= 1
        if error is not None:
            job.error = job.error or error
            self.stop(job)
        return job.over

    def stop(self, job: Job) -> bool:
        """Begin no more of it; whether it is over, or will be when what is under way is done."""
        if job.left:
            job.stopped = True
            job.left.clear()
            jobs = self._jobs[job.owner]
            jobs.remove(job)
            if not jobs:
                del self._jobs[job.owner]
        return job.over
