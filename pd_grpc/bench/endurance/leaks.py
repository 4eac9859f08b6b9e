"""What is left in the servers when nothing is under way, as each says itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from pd_grpc.bench.endurance.fleet import ROUTER, Fleet
from pd_grpc.v1 import admin_pb2

SETTLED_S = 20.0
"""How long everything may take to come back: longer than any lease, grace or drain."""
_LOOK_S = 0.05
_UNHELD = (admin_pb2.BLOCK_STATE_FREE, admin_pb2.BLOCK_STATE_CACHED)


@dataclass(frozen=True)
class Left:
    """Blocks that nobody can hold and that are not free, or that are not accounted for; transfers
    that are still in flight; and both in words."""

    blocks: int = 0
    transfers: int = 0
    words: tuple[str, ...] = ()


async def left_over(fleet: Fleet) -> Left:
    """What has not come back when `SETTLED_S` are over; returns as soon as all has. WorkerLost."""
    until = time.monotonic() + SETTLED_S
    while True:
        total = Left()
        for name in (ROUTER, *fleet.units):
            info = await fleet.server_info(name)
            left = left_in(name, info)
            total = Left(
                total.blocks + left.blocks,
                total.transfers + left.transfers,
                total.words + left.words,
            )
        if not total.words or time.monotonic() > until:
            return total
        await asyncio.sleep(_LOOK_S)


def left_in(name: str, info: admin_pb2.ServerInfo) -> Left:
    """What is left in one server. Its pool is as large as its settings say."""
    states = admin_pb2.BlockState
    held = [c for c in info.blocks if c.state not in _UNHELD and c.blocks]
    flying = sum(count.transfers for count in info.transfers)
    words = [f"{name}: {c.blocks} blocks {states.Name(c.state)}" for c in held]
    pool = int(info.settings.get("num_blocks", 0))
    missing = pool - sum(count.blocks for count in info.blocks)
    if missing:
        words.append(f"{name}: {missing} of {pool} blocks in no state")
    if flying:
        words.append(f"{name}: {flying} transfers in flight")
    return Left(sum(c.blocks for c in held) + abs(missing), flying, tuple(words))
