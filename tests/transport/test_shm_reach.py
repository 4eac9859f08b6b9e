"""P's half of shm: whose pools it has mapped, and when it lets go of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.transport.base import SendSide, Unreachable
from pd_grpc.transport.shm.send import ShmTransport
from pd_grpc.v1 import layout_pb2, types_pb2
from tests.transport.shm_pool import BLOCKS, LAYOUT, LentPool, P, lent_pool
from tests.waiting import until

CAME, WENT = ("p", 7, True), ("p", 7, False)


def decode(epoch: int, name: str = "d") -> types_pb2.Instance:
    return types_pb2.Instance(name=name, epoch=epoch, role=types_pb2.ROLE_DECODE)


def shard_of(lent: LentPool, endpoint: str) -> layout_pb2.Shard:
    return layout_pb2.Shard(endpoint=endpoint, transport_metadata=lent.receive.metadata())


@contextlib.asynccontextmanager
async def pools(count: int) -> AsyncIterator[list[LentPool]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(lent_pool()) for _ in range(count)]


@pytest_asyncio.fixture
async def transport() -> AsyncIterator[ShmTransport]:
    memory = HostKvMemory(bytearray(BLOCKS * LAYOUT.block_bytes), LAYOUT)
    made = ShmTransport(SendSide(P, LAYOUT, memory, grpc.aio.insecure_channel))
    yield made
    await made.stop()


async def test_a_pool_is_mapped_once_and_let_go_of_with_its_shard(transport: ShmTransport) -> None:
    async with pools(1) as (lent,):
        for _ in range(2):
            await transport.reach([shard_of(lent, "a")], decode(1))
        assert lent.news == [CAME]
        transport.forget("a")
        await until(lambda: lent.news == [CAME, WENT])


@pytest.mark.parametrize("endpoint", ["a", "b"])
async def test_the_pool_of_a_decode_that_was_restarted_is_not_kept(
    transport: ShmTransport, endpoint: str
) -> None:
    """Its memory would stay as long as its successor is talked to. The shard's port is another
    one as a rule."""
    async with pools(3) as (first, second, other):
        await transport.reach([shard_of(first, "a")], decode(1))
        await transport.reach([shard_of(other, "c")], decode(1, "e"))
        await transport.reach([shard_of(second, endpoint)], decode(2))
        await until(lambda: first.news == [CAME, WENT])
        assert (second.news, other.news) == ([CAME], [CAME])


async def test_an_earlier_process_takes_nothing_from_a_later_one(transport: ShmTransport) -> None:
    async with pools(2) as (first, second):
        await transport.reach([shard_of(second, "b")], decode(2))
        await transport.reach([shard_of(first, "a")], decode(1))
        assert (first.news, second.news) == ([CAME], [CAME])


async def test_a_pool_that_comes_when_its_shard_is_forgotten_is_let_go_of(
    transport: ShmTransport,
) -> None:
    async with pools(2) as (lent, other):
        forgotten = asyncio.create_task(transport.reach([shard_of(lent, "a")], decode(1)))
        wanted = asyncio.create_task(transport.reach([shard_of(other, "b")], decode(1, "e")))
        await asyncio.sleep(0)  # Both have asked, and nobody has answered.
        transport.forget("a")
        with pytest.raises(Unreachable, match="forgotten"):
            await forgotten
        await wanted
        await until(lambda: lent.news == [CAME, WENT])
        assert other.news == [CAME]


async def test_nothing_stays_mapped_when_the_transport_stops(transport: ShmTransport) -> None:
    async with pools(2) as (lent, late):
        await transport.reach([shard_of(lent, "a")], decode(1))
        coming = asyncio.create_task(transport.reach([shard_of(late, "b")], decode(1)))
        await asyncio.sleep(0)
        await transport.stop()
        with pytest.raises(Unreachable, match="forgotten"):
            await coming
        for each in (lent, late):
            await until(lambda each=each: each.news == [CAME, WENT])  # type: ignore[misc]
