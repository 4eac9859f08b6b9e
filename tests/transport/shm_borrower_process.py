"""A process that borrows a pool and does as it is told on standard input.

`python -m tests.transport.shm_borrower_process SHARD_HEX [netns|full]`: prints `attached` or what
kept it from the pool; `full` has no descriptor left once it has connected, and goes on living
without the pool. Then `write BLOCK BYTE` fills a block, `drop` closes its connection without a
word, `fork` leaves a child that tries to write to the pool and prints how that ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import sys

from pd_grpc.transport.base import Unreachable
from pd_grpc.transport.shm import borrower
from pd_grpc.transport.shm.copying import copy_each
from pd_grpc.transport.shm.mapping import Attachment
from pd_grpc.transport.shm.packets import unix_socket
from pd_grpc.v1 import shm_pb2
from tests.transport.shm_pool import LAYOUT, P

CLONE_NEWNET = 0x40000000


def main(shard_hex: str, how: str) -> None:
    if how == "netns" and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        print(f"no netns: {os.strerror(ctypes.get_errno())}", flush=True)
        return
    shard = shm_pb2.ShmShard.FromString(bytes.fromhex(shard_hex))
    sockets = []

    def kept() -> socket.socket:
        sockets.append(unix_socket())
        if how == "full":
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        return sockets[-1]

    setattr(borrower, "unix_socket", kept)  # noqa: B010 - the module imports it for itself
    try:
        attachment = asyncio.run(borrower.borrow(shard, P, LAYOUT))
    except Unreachable as error:
        print(f"unreachable: {error}", flush=True)
        if how == "full":
            sys.stdin.readline()
        return
    print("attached", flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "write":
            fill(attachment, int(rest[0]), int(rest[1]))
        elif word == "drop":
            sockets[-1].close()
        elif word == "fork":
            child = os.fork()
            if not child:
                fill(attachment, 0, 99)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            print(f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "wrote")
        print("done", flush=True)


def fill(attachment: Attachment, block: int, byte: int) -> None:
    for group, layers in ((0, 3), (1, 1)):
        piece = memoryview(bytes([byte]) * layers * LAYOUT.layer_bytes(group))
        copy_each(attachment.mapping.copies([block], group, 0, layers, [piece]))


if __name__ == "__main__":
    main(sys.argv[1], "".join(sys.argv[2:]))
