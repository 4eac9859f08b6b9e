"""One process of the benchmark: a P, a D, a router or the driver.

Spoken to in lines of JSON. The first on standard input says what to be; the first on standard
output says that it is ready. From then on each line in is a command and gets one line out. The end
of standard input ends the process, however its parent went.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pd_grpc.bench.decode_worker import DecodeWorker
from pd_grpc.bench.driver import Driver
from pd_grpc.bench.prefill_worker import PrefillWorker
from pd_grpc.bench.router_worker import RouterWorker
from pd_grpc.servers.allocator import keep_freed_memory
from pd_grpc.telemetry.logs import configure_logging

_LINE_BYTES = 1 << 26


class Worker(Protocol):
    """What a process does."""

    async def start(self) -> Mapping[str, Any]:
        """Begin; what others must know of it."""
        ...

    async def do(self, command: Mapping[str, Any]) -> Any:
        """Carry a command out; ValueError for one it does not know."""
        ...

    async def stop(self) -> None:
        """End everything."""
        ...


WORKERS: Mapping[str, Callable[[Mapping[str, Any]], Worker]] = {
    "prefill": PrefillWorker,
    "decode": DecodeWorker,
    "router": RouterWorker,
    "driver": Driver,
}


async def serve() -> None:
    """Live until standard input ends."""
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    spec = json.loads(await reader.readline())
    worker = WORKERS[spec["role"]](spec)
    _say(await worker.start())
    try:
        while line := await reader.readline():
            _say(await worker.do(json.loads(line)))
    finally:
        await worker.stop()


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    keep_freed_memory()
    configure_logging("human", "error")
    asyncio.run(serve())
