"""Where a pool's bytes lie: in this process alone, or where others of this host may map them."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref


class PoolBuffer:
    """`nbytes` zero bytes, of which no page is taken before it is written to. Only Linux has memory
    to share of this kind."""

    def __init__(self, nbytes: int, shared: bool) -> None:
        self.fd: int | None = None
        """Of the memfd, when `shared`; it is closed with this object, or by `close`."""
        if not shared or sys.platform != "linux":
            self.view = memoryview(bytearray(nbytes))
            return
        fd = os.memfd_create("pd-grpc-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, fd)
        self.fd = fd
        os.ftruncate(fd, nbytes)
        # Who has the memory can take none of it away from the others, nor seal it against them.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        self.view = memoryview(mmap.mmap(fd, nbytes))

    def close(self) -> None:
        """Let nobody else map the memory any more; who has mapped it keeps it."""
        if self.fd is not None:
            self._close()
            self.fd = None
