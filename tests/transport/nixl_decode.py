"""A decode server that does not destroy the agent of a P before it is told to.

`python -m tests.transport.nixl_decode FLAGS...`, those of `pd-grpc serve decode`. After the line
that says where it is reached it answers each line of standard input by one in JSON: `counts` by how
many blocks are in which state, `pattern` by how many it has taken of the pool and filled, `compare`
by whether these are whole, and then they are given back; `let` has it destroy what it is to, and
`freed` waits until nothing is quarantined and says how many are free.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading

from pd_grpc.blocks.pool import BlockState
from pd_grpc.cli.settings import load_settings
from pd_grpc.decode.server import DecodeServer, start_decode
from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.transport.nixl.agent import Agent
from tests.transport.nixl_process import PATTERN
from tests.waiting import until

NEIGHBOURS = 4


def hold_agents(let: threading.Event) -> None:
    """Have agents destroyed only once that is let, but for those without memory."""
    make, destroy = Agent.__init__, Agent.destroy
    of_pools: set[Agent] = set()

    def making(self: Agent, region: object, loopback: bool) -> None:
        make(self, region, loopback)  # type: ignore[arg-type]
        if region is not None:
            of_pools.add(self)

    def destroying(self: Agent) -> None:
        if self in of_pools:
            let.wait()
        destroy(self)

    Agent.__init__ = making  # type: ignore[method-assign]
    Agent.destroy = destroying  # type: ignore[method-assign]


async def answer(d: DecodeServer, let: threading.Event) -> None:
    memory = d.engine.memory
    layers = d.engine.layout.groups[0].layers
    pattern = bytes([PATTERN]) * (NEIGHBOURS * d.engine.layout.block_bytes)
    while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
        said: object = None
        if command == "pattern":
            taken = d.pool.reserve(NEIGHBOURS, owner="neighbours")
            memory.write(taken.blocks, 0, 0, layers, memoryview(pattern))
            said = len(taken.blocks)
        elif command == "compare":
            said = b"".join(memory.read(taken.blocks, 0, 0, layers)) == pattern
            taken.release()
        elif command == "let":
            let.set()
        elif command == "freed":
            await until(lambda: not d.pool.counts()[BlockState.QUARANTINED])
            said = d.pool.free
        else:
            d.pool.check()
            said = {state.name: count for state, count in d.pool.counts().items()}
        print(json.dumps(said), flush=True)


async def main(argv: list[str]) -> None:
    let = threading.Event()
    hold_agents(let)
    config = load_settings(DecodeConfig, argv, os.environ)
    d = await start_decode(config, SimEngine(config))
    print("decode d at", d.endpoint, flush=True)
    await answer(d, let)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
