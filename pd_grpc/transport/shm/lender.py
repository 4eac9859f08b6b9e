"""Hands D's pool to the Ps of this host, and knows when each has let go of it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
from collections import Counter

from pd_grpc.transport.base import WriterNews
from pd_grpc.transport.shm.packets import (
    HANDSHAKE_S,
    Ended,
    address,
    receive,
    send,
    send_with_descriptor,
    unix_socket,
)
from pd_grpc.transport.shm.peers import Stranger, check_user, gone, watch_process
from pd_grpc.v1 import shm_pb2

MOST_BORROWERS = 1024
"""Connections at once; each takes two descriptors."""
ACCEPT_AGAIN_S = 0.1
ACCEPT_EVERY_S = 0.001
"""Whoever connects as fast as it can, of whatever user, takes no more of the shard's loop than that
leaves it."""
_BACKLOG = 64
_Writer = tuple[str, int]


class Lender:
    """One pool. A process that has attached is a writer until it says that it has detached, or has
    ended; that its connection ends proves neither."""

    def __init__(self, fd: int, pool_bytes: int) -> None:
        """`fd` is the memfd, which stays the caller's."""
        self.shard = shm_pb2.ShmShard(
            socket=f"pd-grpc/{secrets.token_hex(16)}",
            secret=secrets.token_bytes(16),
            pool_id=secrets.token_bytes(16),
            pool_bytes=pool_bytes,
        )
        self._fd = fd
        self._news: WriterNews = lambda name, epoch, writes: None
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: Counter[_Writer] = Counter()

    def start(self, news: WriterNews) -> None:
        """Listen, on the running loop."""
        self._news = news
        self._listener = unix_socket()
        self._listener.bind(address(self.shard.socket))
        self._listener.listen(_BACKLOG)
        self._keep(asyncio.create_task(self._accept(self._listener), name="pd-shm-accept"))

    async def stop(self) -> None:
        """Lend to nobody any more, and forget who has borrowed."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                # As when there are no descriptors left: who waits is served once there are.
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._tasks) > MOST_BORROWERS:
                sock.close()
            else:
                self._keep(asyncio.create_task(self._serve(sock), name="pd-shm-borrower"))
            await asyncio.sleep(ACCEPT_EVERY_S)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(sock.close)
            # One that is turned away hears the end of its connection, and has KV go another way.
            with contextlib.suppress(Stranger, Ended, asyncio.TimeoutError):
                pidfd, writer = await self._lend(sock)
                stack.callback(os.close, pidfd)
                await self._attached(sock, pidfd, writer)

    async def _lend(self, sock: socket.socket) -> tuple[int, _Writer]:
        """Hand the pool over to whom it may be; a pidfd of the process, and its name."""
        check_user(sock)
        asked = await asyncio.wait_for(receive(sock, shm_pb2.ShmAttach), HANDSHAKE_S)
        if not hmac.compare_digest(asked.secret, self.shard.secret):
            raise Stranger("its secret is another")
        pidfd = watch_process(sock)
        try:
            pool = shm_pb2.ShmPool(pool_id=self.shard.pool_id, pool_bytes=self.shard.pool_bytes)
            send_with_descriptor(sock, pool, self._fd)
        except Ended:
            os.close(pidfd)
            raise
        return pidfd, (asked.instance.name, asked.instance.epoch)

    async def _attached(self, sock: socket.socket, pidfd: int, writer: _Writer) -> None:
        """From here on it can write, whatever it says; until it is gone."""
        self._count(writer, 1)
        try:
            ended = asyncio.create_task(gone(pidfd))
            said = asyncio.create_task(self._until_detached(sock))
            try:
                await asyncio.wait([ended, said], return_when=asyncio.FIRST_COMPLETED)
                if not ended.done() and not said.result():
                    sock.close()
                    await ended
            finally:
                for task in (ended, said):
                    task.cancel()
                await asyncio.wait([ended, said])
        finally:
            self._count(writer, -1)

    async def _until_detached(self, sock: socket.socket) -> bool:
        """True when P says that it has let go, False when it can say nothing any more."""
        try:
            while (said := await receive(sock, shm_pb2.ShmState)).attached:
                await send(sock, said)
        except Ended:
            return False
        return said.pool_id == self.shard.pool_id

    def _count(self, writer: _Writer, change: int) -> None:
        before = self._writers[writer]
        self._writers[writer] += change
        if before == 0 or before + change == 0:
            self._news(*writer, before == 0)
        if before + change == 0:
            del self._writers[writer]
