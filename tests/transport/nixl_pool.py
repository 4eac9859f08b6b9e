"""A pool that Ps write to through NIXL, as a D has it, and what it takes to write there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TypeVar

import pytest

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.transport.base import ReceiveSide, SendSide
from pd_grpc.transport.nixl.link import Link, attach
from pd_grpc.transport.nixl.receive import NixlReceive
from pd_grpc.v1 import nixl_pb2, types_pb2
from tests.transport.shm_pool import LAYOUT, P

BLOCKS = 64
SIZE = LAYOUT.block_bytes
_WIDE = (Plane(PlaneKind.K, "uint8", 1, 4096), Plane(PlaneKind.V, "uint8", 1, 4096))
LARGE = KvLayout(
    model="m", positions="p", block_size=16, groups=(KvGroup(GroupKind.FULL, 4, _WIDE),)
)
"""64 blocks of it take 32 MiB, which is some milliseconds under way."""
HOST = "127.0.0.1"


_INSTALLED = find_spec("nixl_cu12") is not None or find_spec("nixl_cu13") is not None
_WHY_NOT = "NIXL is not installed here: `make nixl` makes .venv-nixl, which has it"
Test = TypeVar("Test", bound=Callable[..., object])


def needs_nixl(test: Test) -> Test:
    """Marks what runs NIXL itself."""
    skipping: Callable[[Test], Test] = pytest.mark.skipif(not _INSTALLED, reason=_WHY_NOT)
    marking: Callable[[Test], Test] = pytest.mark.nixl
    return marking(skipping(test))


@dataclass
class OpenPool:
    """`news` are the writers' comings and goings: name, epoch, and whether it can write."""

    buffer: bytearray
    receive: NixlReceive
    layout: KvLayout
    news: list[tuple[str, int, bool]] = field(default_factory=list)

    @property
    def shard(self) -> nixl_pb2.NixlShard:
        return nixl_pb2.NixlShard.FromString(self.receive.metadata())

    def block(self, number: int) -> bytes:
        size = self.layout.block_bytes
        return bytes(self.buffer[number * size : (number + 1) * size])


@contextlib.asynccontextmanager
async def open_pool(layout: KvLayout = LAYOUT) -> AsyncIterator[OpenPool]:
    """One that takes writers in on the running loop."""
    buffer = bytearray(BLOCKS * layout.block_bytes)
    memory = HostKvMemory(buffer, layout)
    pool = OpenPool(buffer, NixlReceive(ReceiveSide(layout, memory, HOST)), layout)
    await pool.receive.start(lambda *said: pool.news.append(said))
    try:
        yield pool
    finally:
        await pool.receive.stop()


class Writer:
    """A P with a pool of its own, each block of which is full of its number and one."""

    def __init__(self, layout: KvLayout = LAYOUT, instance: types_pb2.Instance = P) -> None:
        size = layout.block_bytes
        self.buffer = bytearray(b"".join(bytes([i + 1]) * size for i in range(BLOCKS)))
        memory = HostKvMemory(self.buffer, layout)
        self.side = SendSide(instance, layout, memory, lambda endpoint: pytest.fail())
        self.link: Link | None = None

    async def attach(self, shard: nixl_pb2.NixlShard) -> Link:
        self.link = await attach(HOST, shard, self.side)
        return self.link

    async def write(self, blocks: Sequence[int], to: Sequence[int]) -> bool:
        """Copy whole blocks; whether all have landed."""
        assert self.link is not None
        groups = enumerate(self.side.layout.groups)
        parts = [self.link.write(blocks, to, i, 0, group.layers) for i, group in groups]
        return all([await part for part in parts])
