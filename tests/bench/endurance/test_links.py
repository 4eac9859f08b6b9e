"""A link between two plain sockets of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from pd_grpc.bench.endurance.links import Link, owner_among
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from tests.waiting import LIMIT_S, until

SILENCE_S = 0.1


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(100):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link(lambda port: "p0")
    await link.start()
    link.upstream = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield link
    await link.stop()
    server.close()
    await server.wait_closed()


@contextlib.asynccontextmanager
async def connected(
    link: Link,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = link.endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_it_carries_both_ways_and_tells_of_an_end(link: Link) -> None:
    async with connected(link) as (reader, writer):
        writer.write(b"hello")
        assert await asyncio.wait_for(reader.readexactly(5), LIMIT_S) == b"hello"
        link.reset("p0")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""


async def test_a_cut_is_silent_and_what_is_under_way_comes_after_it(link: Link) -> None:
    async with connected(link) as (reader, writer):
        writer.write(b"a")
        await asyncio.wait_for(reader.readexactly(1), LIMIT_S)
        link.cut("p0")
        writer.write(b"b")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1), SILENCE_S)
        link.heal("p0")
        assert await asyncio.wait_for(reader.readexactly(1), LIMIT_S) == b"b"


async def test_who_comes_during_a_cut_is_silent_too(link: Link) -> None:
    link.cut("p0")
    async with connected(link) as (reader, writer):
        writer.write(b"a")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1), SILENCE_S)
        link.heal("p0")
        assert await asyncio.wait_for(reader.readexactly(1), LIMIT_S) == b"a"


async def test_a_cut_of_another_client_changes_nothing(link: Link) -> None:
    link.cut("router")
    async with connected(link) as (reader, writer):
        writer.write(b"a")
        assert await asyncio.wait_for(reader.readexactly(1), LIMIT_S) == b"a"


async def test_nobody_behind_it_is_the_end_of_a_connection(link: Link) -> None:
    link.upstream = ""
    async with connected(link) as (reader, _):
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""


async def test_a_client_that_speaks_grpc_is_known_by_its_process() -> None:
    link = Link(owner_among(lambda: {"init": 1, "p1": os.getpid()}))
    await link.start()
    async with rpc.aio_channel(link.endpoint, Timeouts(), Sizes()) as channel:
        channel.get_state(try_to_connect=True)
        await until(lambda: link.cut("p1") == 1)
    await link.stop()
