"""A prefill server that stops itself in the middle of its first write into D's memory.

`python -m tests.faults.halting_prefill FLAGS...`, those of `pd-grpc serve prefill`. It prints
`halting` before it stops, and `resumed` once it has been continued and has written the rest.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

from pd_grpc.servers import prefill
from pd_grpc.transport.shm.copying import Copy, copy_each
from pd_grpc.transport.shm.mapping import PoolMapping


def main() -> int:
    right = PoolMapping.write
    written = 0

    def halting(
        self: PoolMapping,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        pieces: Sequence[memoryview],
        copy: Callable[[Iterable[Copy]], None] = copy_each,
    ) -> None:
        nonlocal written
        written += 1
        if written > 1:
            right(self, blocks, group, layer, layers, pieces, copy)
            return
        assert len(blocks) > 1, "there is a middle"
        whole = memoryview(b"".join(pieces))
        middle = whole.nbytes // len(blocks)
        right(self, blocks[:1], group, layer, layers, [whole[:middle]], copy)
        print("halting", flush=True)
        # To this thread: another might take one for the process, while this one wrote on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        right(self, blocks[1:], group, layer, layers, [whole[middle:]], copy)
        print("resumed", flush=True)

    PoolMapping.write = halting  # type: ignore[method-assign]
    return prefill.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
