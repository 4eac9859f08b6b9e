"""Which bytes P copies next, whoever asks when: all of them once, in turns, and none once it was
told to stop."""

from __future__ import annotations

import random

import pytest

from pd_grpc.transport.shm import copy_queue
from pd_grpc.transport.shm.copy_queue import Copy, CopyQueue, Job, copies, parts

PART = 7


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_queue, "PART_BYTES", PART)


def cut(data: memoryview, at: list[int]) -> list[memoryview]:
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


def copy(part: list[Copy]) -> None:
    for to, source in part:
        to[:] = source


def pieces_of(draw: random.Random, data: memoryview) -> list[memoryview]:
    most = min(9, len(data))
    return cut(data, sorted(draw.sample(range(1, len(data)), draw.randrange(most))))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_size_fill_targets_of_any_size_in_parts(seed: int) -> None:
    draw = random.Random(seed)
    source = memoryview(draw.randbytes(500)).toreadonly()
    target = memoryview(bytearray(500))
    found = list(parts(copies(pieces_of(draw, target), pieces_of(draw, source))))
    sizes = [sum(to.nbytes for to, _ in part) for part in found]
    assert sizes[:-1] == [PART] * (500 // PART) and sum(sizes) == 500
    for part in found:
        copy(part)
    assert target == source


class Slab:
    """One to be copied, and where to."""

    def __init__(self, owner: int, size: int, fill: int) -> None:
        self.target = bytearray(size)
        self.source = bytes([fill]) * size
        self.job = Job(owner, [(memoryview(self.target), memoryview(self.source))])


@pytest.mark.parametrize("seed", range(200))
def test_in_any_order_of_events_all_is_copied_or_stops_for_good(seed: int) -> None:
    """Threads take parts and are done with them in any order, while slabs come and are stopped."""
    draw = random.Random(seed)
    queue = CopyQueue()
    slabs = [Slab(draw.randrange(3), draw.randrange(1, 40), i + 1) for i in range(8)]
    coming, under_way = list(slabs), list[tuple[Job, list[Copy]]]()
    over, stopped = list[Job](), dict[Job, bytes]()
    while coming or under_way or len(over) < len(slabs):
        what = draw.choice(["add", "take", "take", "done", "done", "stop"])
        if what == "add" and coming:
            queue.add(coming.pop(0).job)
        elif what == "take" and len(under_way) < 2 and (taken := queue.take()):
            assert taken[0] not in stopped, "no part of it is begun any more"
            under_way.append(taken)
        elif what == "done" and under_way:
            job, part = under_way.pop(draw.randrange(len(under_way)))
            copy(part)
            if queue.done(job):
                over.append(job)
        elif what == "stop" and draw.random() < 0.1:
            slab = draw.choice(slabs)
            job = slab.job
            if slab in coming or job in over or job in stopped:
                continue
            assert queue.stop(job) == all(each is not job for each, _ in under_way)
            stopped[job] = bytes(slab.target)
            if job.over:
                over.append(job)
    assert len(over) == len(set(over)), "it is said once"
    assert queue.take() is None
    for slab in slabs:
        assert slab.job.over and slab.job.whole == (bytes(slab.target) == slab.source)
        if slab.job not in stopped:
            assert slab.job.whole


def test_owners_take_turns_and_each_has_its_slabs_in_order() -> None:
    queue = CopyQueue()
    first, second = Slab(0, 2 * PART, 1), Slab(0, PART, 2)
    other, late = Slab(1, 2 * PART, 3), Slab(2, PART, 4)
    for slab in (first, second, other):
        queue.add(slab.job)
    order = []
    while taken := queue.take():
        order.append(taken[0])
        queue.done(taken[0])
        if len(order) == 1:
            queue.add(late.job)
    wanted = [first, other, first, late, other, second]
    assert order == [slab.job for slab in wanted]


def test_a_part_that_fails_is_the_last_of_its_slab() -> None:
    queue = CopyQueue()
    slab, other = Slab(0, 3 * PART, 1), Slab(1, PART, 2)
    queue.add(slab.job)
    queue.add(other.job)
    taken = [queue.take() for _ in range(3)]
    assert [each and each[0] for each in taken] == [slab.job, other.job, slab.job]
    error = MemoryError()
    assert not queue.done(slab.job, error), "another part of it is being copied"
    assert queue.take() is None
    assert queue.done(slab.job)
    assert slab.job.error is error and not slab.job.whole
    assert queue.done(other.job) and other.job.whole


def test_a_slab_without_bytes_is_over_at_once() -> None:
    queue = CopyQueue()
    job = Job(0, [])
    queue.add(job)
    assert job.over and job.whole and queue.take() is None
