"""How P writes into D's pool: every byte where it belongs, by no thread or by two, and nothing once
it has said that it has stopped."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from pd_grpc.transport.shm import copying
from pd_grpc.transport.shm.copy_queue import PART_BYTES, Copy, copies
from pd_grpc.transport.shm.copying import Copier
from tests.transport.held_copies import LIMIT_S, Held

SIZES = [0, 1, PART_BYTES, 2 * PART_BYTES, 5 * PART_BYTES + 3]


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    made = Copier()
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("pd-shm")]


async def copies_all(copier: Copier, size: int, at_once: int = 1) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    targets = [np.zeros(size + 2, np.uint8) for _ in range(at_once)]
    started = [
        copier.start(i, copies([target.data[1 : size + 1]], [source.data]))
        for i, target in enumerate(targets)
    ]
    for each, target in zip(started, targets, strict=True):
        await asyncio.wait_for(each.over, LIMIT_S)
        assert each.copied and np.array_equal(target[1:-1], source)
        assert not target[0] and not target[-1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("at_once", [1, 8])
async def test_threads_copy_all_of_it(copier: Copier, size: int, at_once: int) -> None:
    await copies_all(copier, size, at_once)


CORES = os.sched_getaffinity(0)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
async def test_each_thread_keeps_to_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier()
    found = []
    both = threading.Barrier(2, timeout=LIMIT_S)

    def look(each: Iterable[Copy]) -> None:
        if threading.current_thread().name.startswith("pd-shm"):
            found.append(os.sched_getaffinity(0))
            both.wait()

    monkeypatch.setattr(copying, "copy_each", look)
    block = memoryview(bytearray(3 * PART_BYTES))
    await asyncio.wait_for(copier.start(0, [(block, block)]).over, LIMIT_S)
    copier.close()
    one, other = found
    assert one and other and one | other == CORES and not one & other
    assert os.sched_getaffinity(0) == CORES, "the loop may be anywhere"


async def test_where_no_thread_is_to_be_had_the_loop_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    await copies_all(Copier(), SIZES[-1], 2)


async def test_that_no_thread_is_to_be_had_later_fails_no_copy(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    await copies_all(copier, SIZES[-1])


async def test_who_stops_a_copy_waits_for_what_is_under_way_and_for_no_more(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(threads=2)
    monkeypatch.setattr(copying, "copy_each", held)
    source, target = bytes([1]) * (9 * PART_BYTES), bytearray(9 * PART_BYTES)
    started = copier.start(0, [(memoryview(target), memoryview(source))])
    held.began()
    stopping = asyncio.create_task(copier.stop([started]))
    await asyncio.sleep(0.2)
    assert not stopping.done() and held.under_way == 2
    held.release.set()
    await asyncio.wait_for(stopping, LIMIT_S)
    assert held.under_way == 0 and started.over.done() and not started.copied
    # One by the loop, one by each thread.
    assert target.count(1) == 3 * PART_BYTES
    target[:] = bytes(len(target))
    await copies_all(copier, SIZES[-1])
    assert target.count(0) == len(target)


async def test_a_slab_that_has_not_begun_is_stopped_at_once(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(threads=2)
    monkeypatch.setattr(copying, "copy_each", held)
    source, target = bytes(3 * PART_BYTES), bytearray([1]) * (3 * PART_BYTES)
    other = bytearray(3 * PART_BYTES)
    first = copier.start(0, [(memoryview(other), memoryview(source))])
    held.began()
    waits = copier.start(1, [(memoryview(target), memoryview(source))])
    await copier.stop([waits])
    assert not waits.copied and held.under_way == 2
    held.release.set()
    await asyncio.wait_for(first.over, LIMIT_S)
    assert first.copied and target.count(1) == len(target)


async def test_nothing_is_written_any_more_once_it_has_failed(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread is waited for: its memory may be another's afterwards."""
    held = Held(threads=2, error=MemoryError())
    monkeypatch.setattr(copying, "copy_each", held)
    target = bytearray(9 * PART_BYTES)
    started = copier.start(0, [(memoryview(target), memoryview(bytes(target)))])
    held.began()
    held.release.set()
    with pytest.raises(MemoryError):
        await asyncio.wait_for(started.over, LIMIT_S)
    assert held.under_way == 0 and not started.copied
    # No view of it is left behind: who unmaps a pool could not.
    del target[:]
