"""Who is at the other end of a Unix socket, and when that process is gone."""

from __future__ import annotations

import os
import socket
import struct

from pd_grpc.transport.shm.packets import readable

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77
"""Of Linux 6.5; Python has no name for it."""


class Stranger(Exception):
    """A peer that the pool is not lent to; the message says why."""


def check_user(sock: socket.socket) -> None:
    """Stranger when the peer is of another user, whose memory is none of ours."""
    _, uid, _ = _credentials(sock)
    if uid != os.geteuid():
        raise Stranger(f"its user is {uid}, not {os.geteuid()}")


def watch_process(sock: socket.socket) -> int:
    """A pidfd of the process that connected, which is the caller's to close.

    Where the kernel cannot tell of the socket itself it is that of the process's number, which may
    have been given anew if that process is gone: a packet that comes afterwards proves that it is
    not. Stranger when it cannot be had.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid, _, _ = _credentials(sock)
    if pid <= 0:
        raise Stranger("its process lies in a PID namespace that is not seen from here")
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise Stranger(f"its process {pid} cannot be watched: {error.strerror}") from error


async def gone(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended, every thread of it."""
    await readable(pidfd)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the peer."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid
