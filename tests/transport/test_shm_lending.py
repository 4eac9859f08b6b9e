"""Handing a pool to the Ps of the same host, and knowing when each has let go of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import os
import signal
import socket
import sys
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.pool_buffer import PoolBuffer
from pd_grpc.transport.base import NotUsable, ReceiveSide, Unreachable
from pd_grpc.transport.shm import borrower as borrowing
from pd_grpc.transport.shm import lender, peers
from pd_grpc.transport.shm.borrower import borrow
from pd_grpc.transport.shm.copying import copy_each
from pd_grpc.transport.shm.peers import Stranger
from pd_grpc.transport.shm.receive import ShmReceive
from pd_grpc.v1 import shm_pb2, types_pb2
from tests.transport.shm_pool import BLOCKS, LAYOUT, LentPool, P, lent_pool
from tests.waiting import until

CAME, WENT = ("p", 7, True), ("p", 7, False)
SIZE = LAYOUT.block_bytes
_TURNED_AWAY = "closed|reset"


@pytest_asyncio.fixture
async def lent() -> AsyncIterator[LentPool]:
    async with lent_pool() as made:
        yield made


def in_dev_shm() -> set[str]:
    return set(os.listdir("/dev/shm"))


def unix_sockets() -> str:
    return Path("/proc/net/unix").read_text()


class Borrower:
    """A process that has borrowed the pool, or could not."""

    def __init__(self, running: asyncio.subprocess.Process) -> None:
        self.running = running

    async def line(self) -> str:
        assert self.running.stdout is not None
        return (await self.running.stdout.readline()).decode().strip()

    async def do(self, command: str) -> list[str]:
        assert self.running.stdin is not None
        self.running.stdin.write(f"{command}\n".encode())
        said = []
        while (line := await self.line()) != "done":
            assert line, "it has ended"
            said.append(line)
        return said


@contextlib.asynccontextmanager
async def borrower(lent: LentPool, *arguments: str) -> AsyncIterator[Borrower]:
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.transport.shm_borrower_process",
        lent.shard.SerializeToString().hex(),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Borrower(running)
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()


async def test_who_borrows_the_pool_writes_where_d_reads(lent: LentPool) -> None:
    attachment = await borrow(lent.shard, P, LAYOUT)
    assert lent.news == [CAME], "D knows before P can ask for anything"
    pieces = [memoryview(bytes([i]) * 3 * LAYOUT.layer_bytes(0)) for i in (1, 2)]
    copy_each(attachment.mapping.copies([5, 2], 0, 0, 3, pieces))
    end = 3 * LAYOUT.layer_bytes(0)
    assert lent.block(5)[:end] == bytes([1]) * end
    assert lent.block(2)[:end] == bytes([2]) * end
    assert lent.block(5)[end:] == bytes(SIZE - end)
    attachment.forget()
    await until(lambda: lent.news == [CAME, WENT])


async def test_a_slab_is_written_whole_however_it_is_cut(lent: LentPool) -> None:
    attachment = await borrow(lent.shard, P, LAYOUT)
    whole = bytes(range(1, 1 + 2 * LAYOUT.layer_bytes(0)))
    pieces = [memoryview(whole)[:5], memoryview(whole)[5:]]
    copy_each(attachment.mapping.copies([3, 4], 0, 1, 1, pieces))
    at = LAYOUT.layer_offset(0, 1)
    stored = [lent.block(b)[at : at + LAYOUT.layer_bytes(0)] for b in (3, 4)]
    assert b"".join(stored) == whole
    attachment.forget()


@pytest.mark.parametrize("block", [-1, BLOCKS, 1 << 31])
async def test_nothing_is_written_outside_the_pool(lent: LentPool, block: int) -> None:
    attachment = await borrow(lent.shard, P, LAYOUT)
    piece = memoryview(b"x" * LAYOUT.layer_bytes(0))
    with pytest.raises(ValueError, match="outside the pool"):
        attachment.mapping.copies([1, block], 0, 0, 1, [piece, piece])
    with pytest.raises(ValueError, match="the pieces are not"):
        attachment.mapping.copies([1], 0, 0, 1, [piece, piece])
    assert bytes(lent.buffer.view) == bytes(BLOCKS * SIZE)
    attachment.forget()


async def test_a_pool_is_let_go_of_when_the_last_stream_has_ended(lent: LentPool) -> None:
    attachment = await borrow(lent.shard, P, LAYOUT)
    attachment.hold()
    attachment.hold()
    attachment.forget()
    attachment.release()
    piece = memoryview(b"x" * LAYOUT.layer_bytes(0))
    copy_each(attachment.mapping.copies([1], 0, 0, 1, [piece]))
    assert lent.news == [CAME]
    attachment.release()
    await until(lambda: lent.news == [CAME, WENT])


async def test_a_process_that_has_it_twice_is_a_writer_until_both_are_gone(lent: LentPool) -> None:
    first, second = [await borrow(lent.shard, P, LAYOUT) for _ in range(2)]
    first.forget()
    other = types_pb2.Instance(name="q", epoch=8)
    third = await borrow(lent.shard, other, LAYOUT)
    assert lent.news == [CAME, ("q", 8, True)]
    second.forget()
    await until(lambda: lent.news == [CAME, ("q", 8, True), WENT])
    third.forget()


@pytest.mark.parametrize("kernel_tells", [True, False])
async def test_a_process_killed_with_the_pool_is_gone_and_leaves_nothing(
    lent: LentPool, kernel_tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the socket's own pidfd, and by that of the process's number, as before Linux 6.5."""
    if not kernel_tells:
        monkeypatch.setattr(peers, "_SO_PEERPIDFD", 9999)
    shm = in_dev_shm()
    async with borrower(lent) as process:
        assert await process.line() == "attached"
        await process.do("write 3 7")
        assert lent.block(3) == bytes([7]) * SIZE
        process.running.send_signal(signal.SIGKILL)
        await until(lambda: lent.news == [CAME, WENT])
    # Others of this machine may put what they like there.
    assert not [name for name in in_dev_shm() - shm if "pd-grpc-kv" in name]


async def test_a_stopped_process_is_not_gone(lent: LentPool) -> None:
    async with borrower(lent) as process:
        assert await process.line() == "attached"
        process.running.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{process.running.pid}/stat")
        await until(lambda: stat.read_text().split()[2] == "T")
        # Whoever comes later is served, so what came before has been looked at.
        (await borrow(lent.shard, types_pb2.Instance(name="q", epoch=1), LAYOUT)).forget()
        await until(lambda: ("q", 1, False) in lent.news)
        assert WENT not in lent.news
        process.running.send_signal(signal.SIGKILL)
        await until(lambda: WENT in lent.news)


async def test_a_connection_that_ends_without_a_word_proves_nothing(lent: LentPool) -> None:
    async with borrower(lent) as process:
        assert await process.line() == "attached"
        await process.do("drop")
        (await borrow(lent.shard, types_pb2.Instance(name="q", epoch=1), LAYOUT)).forget()
        await until(lambda: ("q", 1, False) in lent.news)
        await process.do("write 2 9")
        assert lent.block(2) == bytes([9]) * SIZE, "it can still write"
        assert WENT not in lent.news
        process.running.kill()
        await until(lambda: WENT in lent.news)


async def test_a_forked_child_has_no_part_of_the_pool(lent: LentPool) -> None:
    async with borrower(lent) as process:
        assert await process.line() == "attached"
        assert await process.do("fork") == [f"signal {int(signal.SIGSEGV)}"]
        assert lent.block(0) == bytes(SIZE)


async def test_another_network_namespace_is_another_host(lent: LentPool) -> None:
    """As between two containers of one host, whose names may well be equal."""
    async with borrower(lent, "netns") as process:
        line = await process.line()
    if line.startswith("no netns"):
        pytest.skip(f"a network namespace cannot be made here: {line}")
    assert line == "unreachable: no shared memory: Connection refused"
    assert lent.news == []


async def test_a_stranger_gets_nothing(lent: LentPool) -> None:
    shard = lent.shard
    shard.secret = bytes(16)
    with pytest.raises(Unreachable, match=_TURNED_AWAY):
        await borrow(shard, P, LAYOUT)
    shard = lent.shard
    shard.socket += "x"
    with pytest.raises(Unreachable, match="refused"):
        await borrow(shard, P, LAYOUT)
    assert lent.news == []


async def test_a_peer_of_another_user_gets_nothing(
    lent: LentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Unreachable, match=_TURNED_AWAY):
        await borrow(lent.shard, P, LAYOUT)
    assert lent.news == []


async def test_a_process_that_cannot_be_watched_gets_nothing(
    lent: LentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(sock: socket.socket) -> int:
        raise Stranger("as of another PID namespace")

    monkeypatch.setattr(lender, "watch_process", refuse)
    with pytest.raises(Unreachable, match=_TURNED_AWAY):
        await borrow(lent.shard, P, LAYOUT)
    assert lent.news == []


async def test_a_lender_without_descriptors_serves_once_it_has_some(
    lent: LentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender, "ACCEPT_AGAIN_S", 0.001)
    loop = asyncio.get_running_loop()
    right, refused = loop.sock_accept, 0

    async def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await right(listener)

    # The first is accepted by a call that waits already.
    (await borrow(lent.shard, P, LAYOUT)).forget()
    monkeypatch.setattr(loop, "sock_accept", accept)
    for _ in range(2):
        (await borrow(lent.shard, P, LAYOUT)).forget()
    assert refused == 3


async def test_a_silent_lender_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "HANDSHAKE_S", 0.05)
    async with other_lender(None) as shard:
        with pytest.raises(Unreachable, match="within"):
            await borrow(shard, P, LAYOUT)


async def test_who_gives_up_waiting_for_the_pool_is_no_writer(
    lent: LentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D has handed it over, and it was not taken."""

    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(borrowing, "HANDSHAKE_S", 0.05)
    monkeypatch.setattr(borrowing, "receive_with_descriptor", never)
    with pytest.raises(Unreachable, match="within"):
        await borrow(lent.shard, P, LAYOUT)
    await until(lambda: WENT in lent.news)


@contextlib.asynccontextmanager
async def other_lender(
    fd: int | None, pool_bytes: int = BLOCKS * SIZE, pool_id: bytes = b"pool"
) -> AsyncIterator[shm_pb2.ShmShard]:
    """A D that hands out `fd`, or says nothing; it expects an 8-block pool to be asked for."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = f"pd-grpc-test/{os.getpid()}/{id(listener)}"
    listener.bind(b"\0" + name.encode())
    listener.listen()
    listener.setblocking(False)
    loop = asyncio.get_running_loop()

    async def serve() -> None:
        sock, _ = await loop.sock_accept(listener)
        with sock:
            await loop.sock_recv(sock, 4096)
            if fd is not None:
                said = shm_pb2.ShmPool(pool_id=pool_id, pool_bytes=pool_bytes)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
                sock.sendmsg([said.SerializeToString()], rights)
            await loop.sock_recv(sock, 4096)

    task = asyncio.create_task(serve())
    try:
        yield shm_pb2.ShmShard(socket=name, secret=b"s", pool_id=b"pool", pool_bytes=BLOCKS * SIZE)
    finally:
        task.cancel()
        await asyncio.wait([task])
        listener.close()


def memfd(size: int, sealed: bool = True) -> int:
    if sealed:
        buffer = PoolBuffer(size, shared=True)
        assert buffer.fd is not None
        return os.dup(buffer.fd)
    fd = os.memfd_create("plain")
    os.ftruncate(fd, size)
    return fd


@pytest.mark.parametrize(
    ("descriptor", "told", "why"),
    [
        (lambda: os.open("/dev/zero", os.O_RDWR), {}, "no memfd"),
        (lambda: os.open("/proc/self/exe", os.O_RDONLY), {}, "no memfd|not sealed"),
        (lambda: memfd(BLOCKS * SIZE, sealed=False), {}, "not sealed"),
        (lambda: memfd((BLOCKS - 1) * SIZE), {}, "the memfd has"),
        (lambda: memfd((BLOCKS + 1) * SIZE), {}, "the memfd has"),
        (lambda: memfd(BLOCKS * SIZE), {"pool_id": b"other"}, "another pool"),
        (lambda: memfd(BLOCKS * SIZE), {"pool_bytes": 2 * BLOCKS * SIZE}, "another pool"),
    ],
)
async def test_a_descriptor_that_is_not_the_pools_is_not_written_to(
    descriptor: object, told: dict[str, object], why: str
) -> None:
    fd = descriptor()  # type: ignore[operator]
    gc.collect()  # What earlier tests left to the collector goes now, and is not counted below.
    before = len(os.listdir("/proc/self/fd"))
    try:
        async with other_lender(fd, **told) as shard:  # type: ignore[arg-type]
            with pytest.raises(Unreachable, match=why):
                await borrow(shard, P, LAYOUT)
    finally:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before - 1, "it was closed"


async def test_a_pool_of_other_blocks_is_not_written_to(lent: LentPool) -> None:
    larger = dataclasses.replace(LAYOUT, block_size=3)
    with pytest.raises(Unreachable, match="are not blocks of"):
        await borrow(lent.shard, P, larger)
    await until(lambda: lent.news == [CAME, WENT])


async def test_the_pool_can_neither_shrink_nor_grow(lent: LentPool) -> None:
    fd = lent.buffer.fd
    assert fd is not None
    for size in (0, 2 * BLOCKS * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


async def test_a_lender_that_stops_leaves_no_socket_and_no_writer() -> None:
    async with lent_pool() as lent:
        name = lent.shard.socket
        assert name in unix_sockets()
        attachment = await borrow(lent.shard, P, LAYOUT)
        await lent.receive.stop()
        assert lent.news == [CAME, WENT]
        attachment.forget()
    assert name not in unix_sockets()


def test_a_pool_that_is_not_shared_cannot_be_lent() -> None:
    memory = HostKvMemory(bytearray(BLOCKS * SIZE), LAYOUT)
    with pytest.raises(NotUsable, match="not in shared memory"):
        ShmReceive(ReceiveSide(LAYOUT, memory))
