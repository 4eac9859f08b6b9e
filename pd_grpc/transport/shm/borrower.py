"""Gets the pool of a D: that it comes proves that D is on this host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from pd_grpc.protocol.layout import KvLayout
from pd_grpc.transport.base import Unreachable
from pd_grpc.transport.shm.mapping import Attachment, NotOurs, PoolMapping
from pd_grpc.transport.shm.packets import (
    HANDSHAKE_S,
    LARGEST_PACKET,
    Ended,
    address,
    receive,
    receive_with_descriptor,
    send,
    unix_socket,
)
from pd_grpc.v1 import shm_pb2, types_pb2

CONNECT_AGAIN_S = 0.01


async def borrow(
    shard: shm_pb2.ShmShard, instance: types_pb2.Instance, layout: KvLayout
) -> Attachment:
    """The pool of a shard, mapped. Unreachable when it cannot be had."""
    try:
        sock = unix_socket()
    except OSError as error:
        raise Unreachable(f"no shared memory: {_reason(error)}") from error
    try:
        mapping = await asyncio.wait_for(_handshake(sock, shard, instance, layout), HANDSHAKE_S)
    except BaseException as error:
        # D may have handed it over, and would wait for the end of this process: nothing is mapped.
        _turn_down(sock)
        _detach(sock, shard.pool_id)
        if isinstance(error, OSError | Ended | NotOurs | asyncio.TimeoutError):
            raise Unreachable(f"no shared memory: {_reason(error)}") from error
        raise
    return Attachment(shard.pool_id, mapping, lambda: _detach(sock, shard.pool_id))


async def _handshake(
    sock: socket.socket,
    shard: shm_pb2.ShmShard,
    instance: types_pb2.Instance,
    layout: KvLayout,
) -> PoolMapping:
    await _connect(sock, shard.socket)
    await send(sock, shm_pb2.ShmAttach(secret=shard.secret, instance=instance))
    pool, fd = await receive_with_descriptor(sock, shm_pb2.ShmPool)
    try:
        if (pool.pool_id, pool.pool_bytes) != (shard.pool_id, shard.pool_bytes):
            raise NotOurs("another pool came than the one meant")
        mapping = PoolMapping(fd, pool.pool_bytes, layout)
    finally:
        os.close(fd)
    try:
        await send(sock, shm_pb2.ShmState(pool_id=shard.pool_id, attached=True))
        await receive(sock, shm_pb2.ShmState)
    except BaseException:
        mapping.close()
        raise
    return mapping


async def _connect(sock: socket.socket, name: str) -> None:
    """Connect, which a Unix socket does at once or not at all: with many before us it must be tried
    again."""
    while True:
        try:
            return sock.connect(address(name))
        except BlockingIOError:
            await asyncio.sleep(CONNECT_AGAIN_S)


def _turn_down(sock: socket.socket) -> None:
    """Take nothing more. A packet that is left unread would reset the connection when it is closed,
    and D would not read our last."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)
        while sock.recv(LARGEST_PACKET):
            pass


def _detach(sock: socket.socket, pool_id: bytes) -> None:
    """Say that the pool is not mapped. A D that cannot be told is gone, and its pool with it."""
    with contextlib.suppress(OSError):
        sock.send(shm_pb2.ShmState(pool_id=pool_id).SerializeToString())
    sock.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"D did not hand it over within {HANDSHAKE_S:g} s"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
