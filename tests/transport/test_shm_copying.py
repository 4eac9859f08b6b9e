"""What P writes into D's pool: every byte where it belongs, by one thread or two."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pd_grpc.transport.shm import copying
from pd_grpc.transport.shm.copying import PART_BYTES, Copier, Copy, copies, copy_each


def cut(data: memoryview, at: list[int]) -> list[memoryview]:
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_size_fill_targets_of_any_size_in_order(seed: int) -> None:
    draw = random.Random(seed)
    source = memoryview(draw.randbytes(500)).toreadonly()
    target = memoryview(bytearray(500))
    to = cut(target, sorted(draw.sample(range(1, 500), draw.randrange(9))))
    pieces = cut(source, sorted(draw.sample(range(1, 500), draw.randrange(9))))
    copy_each(copies(to, pieces))
    assert target == source


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    made = Copier()
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("pd-shm")]


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 2 * PART_BYTES, 7 * PART_BYTES + 3])
def test_two_threads_copy_all_of_it(copier: Copier, size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    target = np.zeros(size + 2, np.uint8)
    copier.copy(copies([target.data[1 : size + 1]], [source.data]))
    assert np.array_equal(target[1:-1], source)
    assert not target[0] and not target[-1]


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_is_to_be_had_it_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    copies_all(Copier())


def test_that_no_thread_is_to_be_had_later_fails_no_copy(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    copies_all(copier)


def copies_all(copier: Copier) -> None:
    source = np.random.default_rng(1).integers(0, 256, 4 * PART_BYTES, np.uint8)
    target = np.zeros_like(source)
    copier.copy(copies([target.data], [source.data]))
    assert np.array_equal(target, source)


def test_nothing_is_written_any_more_once_it_has_failed(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread is waited for: its memory may be another's afterwards."""
    began, ended = threading.Event(), threading.Event()
    release = threading.Event()

    def copy_parts(left: Iterator[Copy]) -> None:
        if threading.current_thread().name.startswith("pd-shm"):
            began.set()
            release.wait()
            ended.set()
            return
        assert began.wait(60)
        threading.Timer(0.05, release.set).start()
        raise MemoryError

    monkeypatch.setattr(copying, "copy_each", copy_parts)
    block = memoryview(bytearray(4 * PART_BYTES))
    with pytest.raises(MemoryError):
        copier.copy(copies([block], [block]))
    assert ended.is_set()
