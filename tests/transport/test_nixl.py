"""Writing into a pool through NIXL, and how the right to do so ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.faults import Fault, Reason, TransportFault
from pd_grpc.transport.base import NotUsable, ReceiveSide, SendSide, Slab, Unreachable
from pd_grpc.transport.chunk_codec import checksum
from pd_grpc.transport.nixl import acceptor, agent
from pd_grpc.transport.nixl import link as link_module
from pd_grpc.transport.nixl.link import Link
from pd_grpc.transport.nixl.receive import NixlReceive
from pd_grpc.transport.nixl.send import NixlTransport, Reach
from pd_grpc.v1 import layout_pb2, nixl_pb2, transfer_pb2, transfer_pb2_grpc, types_pb2
from tests.transport.nixl_pool import BLOCKS, HOST, LARGE, SIZE, Writer, needs_nixl, open_pool
from tests.transport.nixl_process import PATTERN
from tests.transport.nixl_servers import freeze
from tests.transport.shm_pool import LAYOUT, P
from tests.transport.test_inline import Heard as Listener
from tests.waiting import until

CAME, WENT = ("p", 7, True), ("p", 7, False)
START_S = 60.0


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.transport.nixl_process", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()


async def line(running: asyncio.subprocess.Process) -> str:
    assert running.stdout is not None
    return (await asyncio.wait_for(running.stdout.readline(), START_S)).decode().strip()


async def do(running: asyncio.subprocess.Process, command: str) -> str:
    assert running.stdin is not None
    running.stdin.write(f"{command}\n".encode())
    return await line(running)


# Where it cannot be used


def halves() -> list[type[NixlReceive | NixlTransport]]:
    return [NixlReceive, NixlTransport]


def make(half: type[NixlReceive | NixlTransport], memory: HostKvMemory) -> None:
    if half is NixlReceive:
        NixlReceive(ReceiveSide(LAYOUT, memory))
    else:
        NixlTransport(SendSide(P, LAYOUT, memory, lambda endpoint: pytest.fail()))


@pytest.mark.parametrize("half", halves())
def test_where_nixl_is_not_installed_it_says_how_to(
    half: type[NixlReceive | NixlTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "find_spec", lambda name: None)
    with pytest.raises(NotUsable, match=r"pd-grpc\[nixl\].*pip install --no-deps nixl==") as raised:
        make(half, HostKvMemory(bytearray(SIZE), LAYOUT))
    assert "nixl-cu12==" in str(raised.value)


class Elsewhere(HostKvMemory):
    """As on a GPU."""

    @property
    def host_address(self) -> int | None:
        return None


@pytest.mark.parametrize("half", halves())
def test_a_pool_that_is_not_in_host_memory_cannot_be_used(
    half: type[NixlReceive | NixlTransport],
) -> None:
    with pytest.raises(NotUsable, match="not in host memory"):
        make(half, Elsewhere(bytearray(SIZE), LAYOUT))


@pytest.mark.parametrize(
    ("tls", "refused"),
    [
        ("all", True),
        ("tcp,cma", True),
        ("^tcp", True),
        ("^cma", True),
        ("rc,sm,self", True),
        ("^shm", False),
        ("^ib,sm", False),
        ("rc,tcp,self", False),
    ],
)
def test_ways_by_which_p_could_write_without_d_are_refused(
    tls: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setattr(agent, "find_spec", lambda name: None)
    with pytest.raises(NotUsable, match="UCX_TLS is" if refused else "not installed"):
        agent.require()


# Writing


@needs_nixl
async def test_what_is_written_lies_where_d_reads_and_nowhere_else() -> None:
    left = set(os.listdir("/dev/shm"))
    async with open_pool() as pool:
        writer = Writer()
        link = await writer.attach(pool.shard)
        assert pool.news == [CAME], "D knows before P can ask for anything"
        # Some lie together at both ends, some at one, some at none.
        pairs = {1: 7, 2: 8, 3: 30, 9: 31, 20: 0}
        assert await writer.write(list(pairs), list(pairs.values()))
        for block, to in pairs.items():
            assert pool.block(to) == bytes([block + 1]) * SIZE
        others = set(range(BLOCKS)) - set(pairs.values())
        assert all(pool.block(block) == bytes(SIZE) for block in others)
        link.forget()
        await link.ended()
        await until(lambda: pool.news == [CAME, WENT])
    assert set(os.listdir("/dev/shm")) <= left


@needs_nixl
async def test_a_layer_is_written_and_its_neighbours_are_not() -> None:
    async with open_pool() as pool:
        link = await Writer().attach(pool.shard)
        assert await link.write([4], [6], 0, 1, 1)
        at, size = LAYOUT.layer_offset(0, 1), LAYOUT.layer_bytes(0)
        written = pool.block(6)
        assert written[at : at + size] == bytes([5]) * size
        assert written[:at] == bytes(at) and written[at + size :] == bytes(SIZE - at - size)
        link.forget()
        await link.ended()


@needs_nixl
@pytest.mark.parametrize("block", [-1, BLOCKS, 1 << 31])
async def test_nothing_is_written_outside_the_pool(block: int) -> None:
    async with open_pool() as pool:
        link = await Writer().attach(pool.shard)
        with pytest.raises(ValueError, match="outside the pool"):
            link.write([1, 2], [1, block], 0, 0, 1)
        assert pool.buffer == bytes(BLOCKS * SIZE)
        link.forget()
        await link.ended()


@needs_nixl
async def test_who_has_nothing_to_write_takes_no_time() -> None:
    async with open_pool() as pool:
        writer = Writer()
        link = await writer.attach(pool.shard)
        assert await writer.write([1], [1])
        began = time.process_time()
        await asyncio.sleep(1.0)
        # Two agents whose threads polled would take a second or two.
        assert time.process_time() - began < 0.5
        link.forget()
        await link.ended()


@needs_nixl
async def test_a_link_is_kept_for_its_last_stream() -> None:
    async with open_pool() as pool:
        writer = Writer()
        link = await writer.attach(pool.shard)
        link.hold()
        link.forget()
        assert await writer.write([1], [1]), "it is alive"
        link.release()
        assert not link.alive
        await link.ended()
        assert not await writer.write([1], [2])
        assert pool.block(2) == bytes(SIZE)


@needs_nixl
async def test_a_stranger_gets_no_agent() -> None:
    async with open_pool() as pool:
        shard = pool.shard
        shard.secret = bytes(16)
        with pytest.raises(Unreachable, match="no writing through NIXL: the other side has closed"):
            await Writer().attach(shard)
        shard = pool.shard
        shard.pool_bytes += SIZE
        with pytest.raises(Unreachable, match="another pool"):
            await Writer().attach(shard)
        await until(lambda: pool.news in ([], [CAME, WENT]))
    with pytest.raises(Unreachable, match=r"refused|Connect call failed"):
        await Writer().attach(pool.shard)


@needs_nixl
async def test_two_writers_are_told_apart_and_end_apart() -> None:
    async with open_pool() as pool:
        first = Writer()
        second = Writer(instance=types_pb2.Instance(name="q", epoch=8))
        one, two = await first.attach(pool.shard), await second.attach(pool.shard)
        one.forget()
        await one.ended()
        await until(lambda: WENT in pool.news)
        assert two.alive and await second.write([3], [3]), "its agent is its own"
        two.forget()
        await two.ended()
        await until(lambda: ("q", 8, False) in pool.news)


# How it ends


def fill(buffer: bytearray) -> bytes:
    """As if the blocks were another's by now."""
    buffer[:] = bytes([PATTERN]) * len(buffer)
    return bytes(buffer)


@needs_nixl
async def test_a_process_killed_in_mid_write_writes_no_more_once_d_says_so() -> None:
    async with (
        open_pool(LARGE) as pool,
        process("write", pool.shard.SerializeToString().hex()) as p,
    ):
        assert await line(p) == "attached"
        await until(lambda: pool.buffer[-1] == BLOCKS)
        p.kill()
        await until(lambda: pool.news == [CAME, WENT])
        pattern = fill(pool.buffer)
        await asyncio.sleep(0.5)
        assert pool.buffer == pattern
    assert not [name for name in os.listdir("/dev/shm") if "ucx" in name or "nixl" in name]


@needs_nixl
async def test_a_process_stopped_in_mid_write_loses_what_it_could_write_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "SILENT_S", 3.0)
    async with (
        open_pool(LARGE) as pool,
        process("write", pool.shard.SerializeToString().hex()) as p,
    ):
        assert await line(p) == "attached"
        await until(lambda: pool.buffer[-1] == BLOCKS)
        p.send_signal(signal.SIGSTOP)
        await until(lambda: pool.news == [CAME, WENT])
        pattern = fill(pool.buffer)
        p.send_signal(signal.SIGCONT)
        assert await line(p) == "lost"
        assert pool.buffer == pattern


@needs_nixl
async def test_what_is_under_way_to_a_stopped_d_is_not_over_before_d_has_ended_it() -> None:
    async with process("serve") as d:
        shard = nixl_pb2.NixlShard.FromString(bytes.fromhex(await line(d)))
        writer = Writer(LARGE)
        link = await writer.attach(shard)
        assert await writer.write([1], [1])
        freeze(d.pid)
        landed = link.write(range(BLOCKS), range(BLOCKS), 0, 0, 4)
        ending = asyncio.create_task(link.end())
        await asyncio.sleep(0.5)
        assert not ending.done() and not landed.done(), "it may land yet"
        d.send_signal(signal.SIGCONT)
        await ending
        assert landed.result() is False
        assert await do(d, "pattern") == "done"
        await asyncio.sleep(0.5)
        assert await do(d, "compare") == "done True"


@needs_nixl
async def test_of_a_d_that_does_not_answer_p_does_not_claim_to_have_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "CONFIRM_S", 0.3)
    async with process("serve") as d:
        shard = nixl_pb2.NixlShard.FromString(bytes.fromhex(await line(d)))
        writer = Writer(LARGE)
        reach = Reach(f"{HOST}:1", shard, writer.side)
        link = writer.link = await reach.link()
        assert await writer.write([1], [1])
        freeze(d.pid)
        landed = link.write(range(BLOCKS), range(BLOCKS), 0, 0, 4)
        await asyncio.wait_for(link.end(), START_S)
        assert landed.result() is False and not link.stopped
        d.send_signal(signal.SIGCONT)
        # The next agent is proof: D has destroyed the one before.
        writer.link = await reach.link()
        assert await do(d, "pattern") == "done"
        await asyncio.sleep(0.5)
        assert await do(d, "compare") == "done True"
        assert await writer.write([2], [5])
        await reach.leave()


@needs_nixl
async def test_a_p_that_attaches_again_has_one_agent_and_d_hears_of_both() -> None:
    async with open_pool(LARGE) as pool:
        first, second = Writer(LARGE), Writer(LARGE)
        before = await first.attach(pool.shard)
        flying = before.write(range(BLOCKS), range(BLOCKS), 0, 0, 4)
        await second.attach(pool.shard)
        assert pool.news == [CAME, WENT, CAME]
        pattern = fill(pool.buffer)
        await before.ended()
        assert before.stopped and flying.done()
        await asyncio.sleep(0.5)
        assert pool.buffer == pattern
        assert await second.write([1], [1])
        assert second.link is not None
        await second.link.end()


@needs_nixl
async def test_writes_fail_when_d_is_killed_and_what_follows_finds_it_gone() -> None:
    async with process("serve") as d:
        shard = nixl_pb2.NixlShard.FromString(bytes.fromhex(await line(d)))
        writer = Writer(LARGE)
        reach = Reach(f"{HOST}:1", shard, writer.side)
        link = await reach.link()
        assert await reach.link() is link
        d.kill()
        landed = link.write(range(BLOCKS), range(BLOCKS), 0, 0, 4)
        assert await asyncio.wait_for(landed, START_S) is False
        await until(lambda: not link.alive)
        # Another than D may have ended the connection, for all that P can see.
        await link.ended()
        assert not link.stopped
        with pytest.raises(Unreachable, match="no writing through NIXL"):
            await reach.link()
        await reach.leave()


@needs_nixl
async def test_a_link_that_failed_is_followed_by_another() -> None:
    async with open_pool() as pool:
        writer = Writer()
        reach = Reach(f"{HOST}:1", pool.shard, writer.side)
        first = await reach.link()
        await first.end()
        writer.link = second = await reach.link()
        assert second is not first and second.alive
        assert await writer.write([2], [5])
        assert pool.block(5) == bytes([3]) * SIZE
        await reach.leave()
        await until(lambda: pool.news[-1] == WENT)


# What P makes of D's word


class Hasty(transfer_pb2_grpc.TransferServiceServicer):
    """A shard that says it has everything as soon as it may."""

    def __init__(self, receive: NixlReceive) -> None:
        self.receive = receive
        self.may = asyncio.Event()

    async def Transfer(self, requests: Any, context: Any) -> None:
        await anext(requests)
        opened = transfer_pb2.TransferOpened(window_bytes=1 << 30)
        opened.target.CopyFrom(self.receive.target([(0, range(BLOCKS))]))
        await context.write(transfer_pb2.TransferResponse(opened=opened))
        await self.may.wait()
        await context.write(transfer_pb2.TransferResponse(completed={}))


class Heard(Listener):
    """May be told that P does not know whether it has stopped."""

    stopped: bool | None = None

    def broken(self, fault: Fault | TransportFault, stopped: bool = True) -> None:
        super().broken(fault)
        self.stopped = stopped


@needs_nixl
async def test_a_shard_that_has_everything_while_p_writes_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise P would use its blocks for another while they are read, and D hear of no write."""
    monkeypatch.setattr(agent.Agent, "landed", lambda self, write: False)
    async with open_pool(LARGE) as pool:
        server, shard, heard = grpc.aio.server(), Hasty(pool.receive), Heard()
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(shard, server)
        endpoint = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
        await server.start()
        memory = HostKvMemory(bytearray(BLOCKS * LARGE.block_bytes), LARGE)
        transport = NixlTransport(SendSide(P, LARGE, memory, grpc.aio.insecure_channel))
        about = layout_pb2.Shard(endpoint=endpoint, transport_metadata=pool.receive.metadata())
        await transport.reach([about], types_pb2.Instance(name="d", epoch=1))
        message = transfer_pb2.TransferOpen(grant_id="g", transport=layout_pb2.TRANSPORT_NIXL)
        stream = transport.open(endpoint, message, heard, START_S, [])
        await heard.said("opened")
        assert await stream.write(Slab(0, 0, 4, 0, BLOCKS), range(BLOCKS))
        ending = asyncio.create_task(stream.end(1, BLOCKS * LARGE.block_bytes))
        shard.may.set()
        await until(lambda: len(heard.words) > 1)
        assert heard.words == ["opened", "broken"]
        assert isinstance(heard.fault, Fault) and heard.fault.metadata == {"state": "completed"}
        assert heard.stopped and pool.news == [CAME, WENT], "D has destroyed what P wrote through"
        assert not await ending
        await transport.stop()
        await server.stop(0)


# What D makes of a chunk


def chunk(link: Link, **fields: object) -> transfer_pb2.KvChunk:
    about = layout_pb2.MemoryDescriptor(kind=layout_pb2.TRANSPORT_NIXL, handle=link.pool_id)
    values = {"layer_count": 3, "block_count": 1, "descriptor": about, **fields}
    return transfer_pb2.KvChunk(**values)  # type: ignore[arg-type]


@needs_nixl
async def test_an_audit_finds_one_bit_that_is_another() -> None:
    async with open_pool() as pool:
        writer = Writer()
        link = await writer.attach(pool.shard)
        assert await writer.write([1], [4])
        crc = checksum(writer.side.memory.read([1], 0, 0, 3))
        named = chunk(link, crc32c=crc)
        pool.receive.land(named, memoryview(b""), [4], fresh=True, audited=True)
        pool.buffer[4 * SIZE] ^= 1
        pool.receive.land(named, memoryview(b""), [4], fresh=True, audited=False)
        with pytest.raises(Fault) as raised:
            pool.receive.land(named, memoryview(b""), [4], fresh=True, audited=True)
        assert raised.value.reason is Reason.KV_CORRUPT
        for wrong in (
            layout_pb2.MemoryDescriptor(kind=layout_pb2.TRANSPORT_SHM, handle=link.pool_id),
            layout_pb2.MemoryDescriptor(kind=layout_pb2.TRANSPORT_NIXL, handle=b"another"),
        ):
            bad = chunk(link, descriptor=wrong)
            with pytest.raises(Fault) as raised:
                pool.receive.land(bad, memoryview(b""), [4], fresh=True, audited=False)
            assert raised.value.reason is Reason.BAD_REQUEST
        link.forget()
        await link.ended()
