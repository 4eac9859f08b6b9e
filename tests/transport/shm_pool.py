"""A pool in shared memory with what lends it, as a D has it, and what it takes to borrow it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.pool_buffer import PoolBuffer
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.transport.base import ReceiveSide
from pd_grpc.transport.shm.receive import ShmReceive
from pd_grpc.v1 import shm_pb2, types_pb2

PLANES = (Plane(PlaneKind.K, "uint8", 1, 4), Plane(PlaneKind.V, "uint8", 1, 4))
LAYOUT = KvLayout(
    model="m",
    positions="p",
    block_size=2,
    groups=(KvGroup(GroupKind.FULL, 3, PLANES), KvGroup(GroupKind.FULL, 1, PLANES)),
)
BLOCKS = 8
P = types_pb2.Instance(name="p", epoch=7, role=types_pb2.ROLE_PREFILL)


@dataclass
class LentPool:
    """`news` are the writers' comings and goings: name, epoch, and whether it can write."""

    buffer: PoolBuffer
    receive: ShmReceive
    news: list[tuple[str, int, bool]] = field(default_factory=list)

    @property
    def shard(self) -> shm_pb2.ShmShard:
        return shm_pb2.ShmShard.FromString(self.receive.metadata())

    def block(self, number: int) -> bytes:
        at = number * LAYOUT.block_bytes
        return bytes(self.buffer.view[at : at + LAYOUT.block_bytes])


@contextlib.asynccontextmanager
async def lent_pool() -> AsyncIterator[LentPool]:
    """One that is lent on the running loop."""
    buffer = PoolBuffer(BLOCKS * LAYOUT.block_bytes, shared=True)
    memory = HostKvMemory(buffer.view, LAYOUT, buffer.fd)
    lent = LentPool(buffer, ShmReceive(ReceiveSide(LAYOUT, memory)))
    await lent.receive.start(lambda *said: lent.news.append(said))
    try:
        yield lent
    finally:
        await lent.receive.stop()
        buffer.close()
