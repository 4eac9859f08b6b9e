"""Packets of the Unix socket between a shard of D and a P that borrows its pool."""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

LARGEST_PACKET = 4096
HANDSHAKE_S = 1.0
"""How long either side waits for each packet of the other's while the pool is handed over."""
_INT_BYTES = array("i").itemsize

M = TypeVar("M", bound=Message)


class Ended(Exception):
    """The connection has ended, or what came is no packet of these."""


def unix_socket() -> socket.socket:
    """A socket of the right kind that blocks nobody."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    made.setblocking(False)
    return made


def address(name: str) -> bytes:
    """The abstract address of a socket's name."""
    return b"\0" + name.encode()


async def send(sock: socket.socket, message: Message) -> None:
    """Send a packet. Ended when the other side has gone."""
    try:
        await asyncio.get_running_loop().sock_sendall(sock, message.SerializeToString())
    except OSError as error:
        raise Ended(f"sending failed: {error.strerror}") from error


async def receive(sock: socket.socket, kind: type[M]) -> M:
    """The next packet. Ended when there is none, or it is another."""
    try:
        data = await asyncio.get_running_loop().sock_recv(sock, LARGEST_PACKET)
    except OSError as error:
        raise Ended(f"receiving failed: {error.strerror}") from error
    return _parse(data, kind)


def send_with_descriptor(sock: socket.socket, message: Message, fd: int) -> None:
    """Send a packet and a descriptor. It is the first one on this connection, so there is room."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))
    try:
        sock.sendmsg([message.SerializeToString()], [rights])
    except OSError as error:
        raise Ended(f"sending failed: {error.strerror}") from error


async def receive_with_descriptor(sock: socket.socket, kind: type[M]) -> tuple[M, int]:
    """The next packet and the descriptor that comes with it, which is the caller's to close. Ended
    when there is no packet, or another number of descriptors than one."""
    await readable(sock.fileno())
    fds: list[int] = []
    try:
        data, ancillary, _, _ = sock.recvmsg(
            LARGEST_PACKET, socket.CMSG_SPACE(2 * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        for level, what, content in ancillary:
            if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _INT_BYTES
                fds += array("i", content[:whole])
        message = _parse(data, kind)
        if len(fds) != 1:
            raise Ended(f"{len(fds)} descriptors came")
    except (OSError, Ended) as error:
        for fd in fds:
            os.close(fd)
        raise error if isinstance(error, Ended) else Ended(f"receiving failed: {error}") from error
    return message, fds[0]


async def readable(fd: int) -> None:
    """Wait until a descriptor can be read from; that of a process cannot before its end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _parse(data: bytes, kind: type[M]) -> M:
    if not data:
        raise Ended("the other side has closed the connection")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Ended("what came is no packet of these") from error
