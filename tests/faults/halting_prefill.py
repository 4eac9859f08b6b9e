"""A prefill server that stops itself in the middle of its first write into D's memory.

`python -m tests.faults.halting_prefill FLAGS...`, those of `pd-grpc serve prefill`. It prints
`halting` before it stops, and `resumed` once it has been continued and has written the rest.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable

from pd_grpc.servers import prefill
from pd_grpc.transport.shm import copying
from pd_grpc.transport.shm.copy_queue import Copy


def main() -> int:
    right = copying.copy_each
    written = 0

    def halting(each: Iterable[Copy]) -> None:
        nonlocal written
        written += 1
        if written > 1:
            right(each)
            return
        part = list(each)
        right((to[: len(to) // 2], source[: len(to) // 2]) for to, source in part)
        print("halting", flush=True)
        # To this thread: another might take one for the process, while this one wrote on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        right((to[len(to) // 2 :], source[len(to) // 2 :]) for to, source in part)
        print("resumed", flush=True)

    setattr(copying, "copy_each", halting)  # noqa: B010 - the module calls it by its name
    return prefill.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
