"""One process of a benchmark: a P, a D, a router, or who asks them or hears from them.

Its argument says what to be. Spoken to in lines of JSON: the first on standard input says how, the
first on standard output says that it is ready. From then on each line in is a command and gets one
line out. The end of standard input ends the process, however its parent went.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

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


WORKERS = {
    "prefill": ("pd_grpc.bench.prefill_worker", "PrefillWorker"),
    "decode": ("pd_grpc.bench.decode_worker", "DecodeWorker"),
    "router": ("pd_grpc.bench.router_worker", "RouterWorker"),
    "driver": ("pd_grpc.bench.driver", "Driver"),
    "plain-prefill": ("pd_grpc.bench.endurance.workers", "PlainPrefill"),
    "plain-decode": ("pd_grpc.bench.endurance.workers", "PlainDecode"),
    "plain-router": ("pd_grpc.bench.endurance.workers", "PlainRouter"),
    "observed-server": ("pd_grpc.bench.telemetry_workers", "ObservedServer"),
    "asker": ("pd_grpc.bench.telemetry_workers", "Asker"),
    "sink": ("pd_grpc.bench.telemetry_sink", "Sink"),
    "serve-client": ("pd_grpc.bench.serve.client", "ServeClient"),
    "kv-asker": ("pd_grpc.bench.kv.decoding", "KvAsker"),
    "kv-pusher": ("pd_grpc.bench.kv.decoding", "KvPusher"),
    "kv-receiver": ("pd_grpc.bench.kv.workers", "KvReceiver"),
    "kv-sender": ("pd_grpc.bench.kv.workers", "KvSender"),
}
"""Imported only where they are needed: dozens of processes are started."""
_PLAIN = frozenset(
    {
        "plain-prefill",
        "plain-decode",
        "plain-router",
        "observed-server",
        "kv-receiver",
        "kv-sender",
    }
)
"""They collect garbage as the servers do, for how their memory grows is looked at, or what their
telemetry costs."""


async def serve(make: Callable[[Mapping[str, Any]], Worker], plain: bool) -> None:
    """Live until standard input ends."""
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    first = await reader.readline()
    if not first:
        return
    worker = make(json.loads(first))
    _say(await worker.start())
    if not plain:
        # What the imports left need not be looked through again, and the objects of a step of 256
        # requests are no reason to look.
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)
    try:
        line = await reader.readline()
        while line:
            following = asyncio.ensure_future(reader.readline())
            work = asyncio.ensure_future(worker.do(json.loads(line)))
            await asyncio.wait({work, following}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                # Nobody waits for an answer any more.
                work.cancel()
                await asyncio.wait({work})
                break
            _say(work.result())
            line = await following
    finally:
        await worker.stop()


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    keep_freed_memory()
    configure_logging("human", "error")
    module_of, name_of = WORKERS[sys.argv[1]]
    # Before it is told how, so that all processes of a system import at the same time.
    make = getattr(importlib.import_module(module_of), name_of)
    asyncio.run(serve(make, sys.argv[1] in _PLAIN))
