"""Either end of a link through NIXL, in a process of its own.

`python -m tests.transport.nixl_process write SHARD_HEX` attaches to a pool, prints `attached`, and
writes all of its own to it again and again, until it prints `lost`. `... serve` prints its shard in
hex; then, on a line of standard input, `pattern` fills the pool and `compare` prints whether the
pattern is whole; either begins with `done`.
"""

from __future__ import annotations

import asyncio
import sys

from pd_grpc.v1 import nixl_pb2
from tests.transport.nixl_pool import BLOCKS, LARGE, Writer, open_pool

PATTERN = 0xA5


async def write(shard_hex: str) -> None:
    writer = Writer(LARGE)
    link = await writer.attach(nixl_pb2.NixlShard.FromString(bytes.fromhex(shard_hex)))
    print("attached", flush=True)
    everything = range(BLOCKS)
    while await writer.write(everything, everything):
        pass
    await link.ended()
    print("lost", flush=True)


async def serve() -> None:
    async with open_pool(LARGE) as pool:
        print(pool.shard.SerializeToString().hex(), flush=True)
        pattern = bytes([PATTERN]) * len(pool.buffer)
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line.strip() == "pattern":
                pool.buffer[:] = pattern
                print("done", flush=True)
            else:
                print("done", pool.buffer == pattern, flush=True)


if __name__ == "__main__":
    asyncio.run(serve() if sys.argv[1] == "serve" else write(sys.argv[2]))
