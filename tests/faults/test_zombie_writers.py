"""Invariant 4: blocks that a process of P may yet write to are nobody's, however long it takes.

P is a real process that is stopped in the middle of a write into D's memory and continued when its
successor has long served others; or that is killed, as D is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pd_grpc.blocks.pool import BlockPool, BlockState, Holding
from pd_grpc.decode.quarantine import Quarantine
from pd_grpc.decode.server import DecodeServer
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import layout_pb2, prefill_pb2_grpc
from tests.prefill.cluster import SMALL, Cluster, Outcome, answer_to, request_to, running
from tests.servers.processes import SIM
from tests.waiting import until

SHARED = ("shm", "inline")
SHM = layout_pb2.TRANSPORT_SHM
BLOCKS = 24
START_S = 30.0
pytestmark = pytest.mark.timeout(120)


@dataclass
class Halting:
    """A P that stops itself in mid-write."""

    process: asyncio.subprocess.Process
    endpoint: str

    async def says(self, word: str) -> None:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), START_S)
        assert line.split()[:1] == [word.encode()], line

    async def stopped(self) -> None:
        """It has written a part, and runs no more."""
        await self.says("halting")
        stat = Path(f"/proc/{self.process.pid}/stat")
        await until(lambda: stat.read_text().split()[2] == "T")


@contextlib.asynccontextmanager
async def halting_prefill() -> AsyncIterator[Halting]:
    flags = ["--name", "p", "--engine", "sim", "--transports", "shm,inline"]
    for field in ("block_size", "num_blocks", "chunk_tokens", "heartbeat_s", "lease_s", "grace_s"):
        flags += [f"--{field.replace('_', '-')}", str(SMALL[field])]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.halting_prefill", *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        ready = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield Halting(process, ready.decode().split()[3])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def quarantined(pool: BlockPool) -> int:
    return pool.counts()[BlockState.QUARANTINED]


async def lose_in_mid_write(cluster: Cluster, p: Halting, d: DecodeServer) -> None:
    """A request whose P stops in mid-write, and that D gives up."""
    lost = request_to(d, tokens=50)
    prefill = prefill_pb2_grpc.PrefillServiceStub(cluster.channel(p.endpoint))
    call = prefill.Prefill(lost.prefill(), timeout=START_S)
    reading = asyncio.ensure_future(call.read())
    generating = asyncio.create_task(cluster.run_generate(d, lost))
    await p.stopped()
    outcome = await generating
    assert isinstance(outcome.fault, Fault) and outcome.fault.reason is Reason.PREFILL_LOST
    assert len(outcome.tokens) <= 1, "none but the first, which is P's own"
    call.cancel()
    await asyncio.wait([reading])


async def serve_under_pressure(cluster: Cluster, d: DecodeServer, rounds: int = 12) -> list[bool]:
    """The successor serves many; whether each answer was right."""
    p = await cluster.prefill(name="p", transports=SHARED)
    found = []
    for seed in range(rounds):
        requests = [request_to(d, tokens=30, random_seed=100 * seed + i) for i in range(2)]
        served = await asyncio.gather(*(cluster.run(p, d, request) for request in requests))
        found += [
            outcome.tokens == answer_to(request)
            for request, (_, outcome) in zip(requests, served, strict=True)
        ]
    (session,) = p.machine.conversations.all()
    assert session.welcome.transport == SHM, "the successor writes itself, too"
    return found


async def decode_through_the_resurrection(
    cluster: Cluster, d: DecodeServer, zombie: Halting, tokens: int, decoding: int
) -> list[tuple[Outcome, list[int]]]:
    """While so many of two others decode, the stopped P is continued and writes what it had
    left."""
    (p,) = cluster.prefills
    requests = [request_to(d, tokens=tokens, max_tokens=7, random_seed=s) for s in (7, 8)]
    legs = [asyncio.create_task(cluster.run(p, d, request)) for request in requests]
    ledger = d.machine.ledger
    await until(lambda: sum(t.handed_off for t in ledger.transfers.values()) == decoding)
    zombie.process.send_signal(signal.SIGCONT)
    await zombie.says("resumed")
    assert not all(leg.done() for leg in legs), "they read their KV after that write"
    done = await asyncio.gather(*legs)
    return [(outcome, answer_to(r)) for r, (_, outcome) in zip(requests, done, strict=True)]


async def a_decode(cluster: Cluster, time_scale: float = 10) -> DecodeServer:
    return await cluster.decode(num_blocks=BLOCKS, transports=SHARED, sim_time_scale=time_scale)


async def test_a_write_that_was_stopped_midway_reaches_nobody_when_it_goes_on() -> None:
    async with running() as cluster, halting_prefill() as zombie:
        d = await a_decode(cluster)
        await lose_in_mid_write(cluster, zombie, d)
        held = quarantined(d.pool)
        assert held == 13
        assert all(await serve_under_pressure(cluster, d))
        assert quarantined(d.pool) == held, "nothing but the writer itself frees them"
        answers = await decode_through_the_resurrection(cluster, d, zombie, 30, 1)
        for outcome, right in answers:
            assert outcome.fault is None
            assert outcome.tokens == right
        # It hears that it was superseded, lets go of D's memory, and ends.
        await until(lambda: quarantined(d.pool) == 0)


async def test_without_the_quarantine_the_neighbour_would_answer_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the test above looks at can be seen."""

    def free(self: Quarantine, grant: str, key: object, holding: Holding, *_: object) -> None:
        holding.release()

    monkeypatch.setattr(Quarantine, "take", free)
    async with running() as cluster, halting_prefill() as zombie:
        d = await a_decode(cluster, time_scale=30)
        await lose_in_mid_write(cluster, zombie, d)
        assert all(await serve_under_pressure(cluster, d, rounds=3))
        # Two whose prompts take all blocks but two, so that one at least is the writer's.
        answers = await decode_through_the_resurrection(cluster, d, zombie, 41, 2)
        assert any(outcome.tokens != right for outcome, right in answers)


@pytest.mark.parametrize("stopped_first", [True, False])
async def test_blocks_of_a_killed_writer_come_back_by_themselves(stopped_first: bool) -> None:
    async with running() as cluster, halting_prefill() as p:
        d = await a_decode(cluster)
        if stopped_first:
            await lose_in_mid_write(cluster, p, d)
            assert quarantined(d.pool) == 13
        else:
            request = request_to(d, tokens=50)
            generating = asyncio.create_task(cluster.run_generate(d, request))
            prefilling = asyncio.create_task(
                cluster.run_prefill(_at(p.endpoint), request)  # type: ignore[arg-type]
            )
            await p.stopped()
        p.process.kill()
        await until(lambda: d.pool.counts()[BlockState.FREE] == BLOCKS)
        if not stopped_first:
            await asyncio.gather(generating, prefilling)
        assert all(await serve_under_pressure(cluster, d))


@dataclass
class _at:
    endpoint: str


def pool_of(pid: int) -> str:
    """The inode of a decode's pool, as /proc shows it."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if fd.readlink().name.startswith("memfd:pd-grpc-kv"):
            return str(fd.stat().st_ino)
    raise AssertionError("it has none")


def maps(inode: str) -> bool:
    """Whether this process has it mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.split()[4] == inode for line in lines)


async def test_a_prefill_lets_go_of_the_memory_of_a_killed_decode() -> None:
    command = (sys.executable, "-m", "pd_grpc.servers.decode", *SIM, "--transports", "shm,inline")
    async with running() as cluster:
        p = await cluster.prefill(transports=SHARED)
        process = await asyncio.create_subprocess_exec(
            *command, "--sim-time-scale", "20", stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            ready = await asyncio.wait_for(process.stdout.readline(), START_S)
            d = ready.decode().split()[3]
            served = await cluster.run(p, _at(d), request_to(d))  # type: ignore[arg-type]
            assert [leg.fault for leg in served] == [None, None]
            assert served[1].tokens == answer_to(request_to(d))
            pool = pool_of(process.pid)
            assert maps(pool)
            request = request_to(d, tokens=200, random_seed=5)
            legs = asyncio.create_task(cluster.run(p, _at(d), request))  # type: ignore[arg-type]
            await until(lambda: bool(p.machine.requests.in_flight))
        finally:
            process.kill()
            await process.wait()
        for leg in await legs:
            assert leg.fault is not None
        await until(lambda: not maps(pool))


@pytest.mark.parametrize("then", [SHARED, ("inline",)])
async def test_a_prefill_lets_go_of_the_memory_of_a_decode_that_is_restarted_under_it(
    then: tuple[str, ...],
) -> None:
    """Its session never ends: the successor answers at the same address before P gives D up."""
    command = (sys.executable, "-m", "pd_grpc.servers.decode", *SIM, "--grace-s", "30")
    first, second = ("--transports", "shm,inline"), ("--transports", ",".join(then))
    async with running() as cluster:
        p = await cluster.prefill(transports=SHARED)
        async with decode_process(*command, *first, "--sim-time-scale", "20") as (process, at):
            served = await cluster.run(p, at, request_to(at.endpoint))  # type: ignore[arg-type]
            assert served[1].tokens == answer_to(request_to(at.endpoint))
            lent = pool_of(process.pid)
            assert maps(lent)
            request = request_to(at.endpoint, tokens=200, random_seed=5)
            legs = asyncio.create_task(cluster.run(p, at, request, 40))  # type: ignore[arg-type]
            await until(lambda: any(r.grant for r in p.machine.requests.in_flight.values()))
        (session,) = p.machine.conversations.all()
        port = at.endpoint.rpartition(":")[2]
        async with decode_process(*command, *second, "--port", port) as (process, at):
            assert all(leg.fault is not None for leg in await legs)
            request = request_to(at.endpoint, random_seed=6)
            served = await cluster.run(p, at, request)  # type: ignore[arg-type]
            assert served[1].tokens == answer_to(request)
            assert p.machine.conversations.all() == [session], "it went on"
            await until(lambda: not maps(lent))
            if then == SHARED:
                assert maps(pool_of(process.pid))


@contextlib.asynccontextmanager
async def decode_process(*command: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, _at]]:
    """A D, which is killed at the end."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        ready = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield process, _at(ready.decode().split()[3])
    finally:
        process.kill()
        await process.wait()
