"""The socket that D lends its pool at: whoever comes there, in whatever number and however badly
off, costs D no more than itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from pd_grpc.transport.base import Unreachable
from pd_grpc.transport.shm.borrower import borrow
from pd_grpc.transport.shm.packets import address, unix_socket
from tests.transport.shm_pool import LAYOUT, LentPool, P, lent_pool
from tests.transport.test_shm_lending import CAME, WENT, borrower
from tests.waiting import until

TOO_MANY = 1000
NONE_MORE = 3


@pytest_asyncio.fixture
async def lent() -> AsyncIterator[LentPool]:
    async with lent_pool() as made:
        yield made


@contextlib.contextmanager
def crowd(lent: LentPool) -> Iterator[list[socket.socket]]:
    """As many as can wait at the door, who say nothing."""
    with contextlib.ExitStack() as stack:
        waiting: list[socket.socket] = []
        for _ in range(TOO_MANY):
            sock = stack.enter_context(unix_socket())
            try:
                sock.connect(address(lent.shard.socket))
            except BlockingIOError:
                break
            waiting.append(sock)
        assert 1 < len(waiting) < TOO_MANY, "the door is full"
        yield waiting


async def test_a_crowd_is_let_in_one_at_a_time_and_the_loop_goes_on(
    lent: LentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    right, let_in = loop.sock_accept, 0

    async def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        nonlocal let_in
        found = await right(listener)
        let_in += 1
        return found

    # The first is let in by a call that waits already.
    (await borrow(lent.shard, P, LAYOUT)).forget()
    monkeypatch.setattr(loop, "sock_accept", accept)
    (await borrow(lent.shard, P, LAYOUT)).forget()
    let_in, most = 0, 0
    with crowd(lent) as waiting:
        while let_in < len(waiting):
            before = let_in
            await asyncio.sleep(0)
            most = max(most, let_in - before)
    assert most == 1
    (await borrow(lent.shard, P, LAYOUT)).forget()


async def test_one_that_finds_the_door_full_is_served_in_its_turn(lent: LentPool) -> None:
    with crowd(lent):
        attachment = await borrow(lent.shard, P, LAYOUT)
    assert lent.news == [CAME]
    attachment.forget()
    await until(lambda: lent.news == [CAME, WENT])


async def test_a_prefill_without_descriptors_cannot_borrow_and_goes_on(lent: LentPool) -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NONE_MORE, usual[1]))
    try:
        with pytest.raises(Unreachable) as raised:
            await borrow(lent.shard, P, LAYOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.EMFILE
    assert lent.news == []


async def test_a_process_that_the_pool_does_not_reach_is_no_writer_while_it_lives(
    lent: LentPool,
) -> None:
    """What came for it the kernel has thrown away; nobody but it can say so."""
    async with borrower(lent, "full") as process:
        assert (await process.line()).startswith("unreachable: no shared memory: 0 descriptors")
        await until(lambda: lent.news == [CAME, WENT])
        assert process.running.returncode is None
