"""A system under test: its servers and its driver, each a process, over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import grpc.aio

from pd_grpc.bench.door import Manners
from pd_grpc.bench.driver import Ended
from pd_grpc.bench.legs import BenchRequest
from pd_grpc.bench.processes import ANSWER_S, WorkerLost, WorkerProcess
from pd_grpc.bench.setup import THREADS, Row, Setup
from pd_grpc.bench.workload import Length
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc

_LOOK_S = 0.02
_MARGIN_S = 30.0
_runs = count(1)


class BlocksLost(RuntimeError):
    """A run has ended and blocks have not come back."""


@dataclass(frozen=True)
class Group:
    """Requests of which `at_once` are under way at any time."""

    requests: Sequence[BenchRequest]
    at_once: int


@dataclass
class System:
    """A running one; see `running_system`."""

    setup: Setup
    prefills: list[WorkerProcess]
    decodes: list[WorkerProcess]
    driver: WorkerProcess
    _run: int = field(default_factory=lambda: next(_runs))
    _numbers: Any = field(default_factory=count)

    def requests(self, lengths: Sequence[Length], decode: int = 0) -> list[BenchRequest]:
        """Requests of these lengths for one D."""
        target = (f"d{decode}", self.decodes[decode].endpoint)
        return [
            BenchRequest(f"r{self._run}-{next(self._numbers)}", each.prompt, each.output, (target,))
            for each in lengths
        ]

    async def closed(self, groups: Mapping[str, Group], limit_s: float) -> list[Ended]:
        """Drive closed groups; see `Driver`."""
        wire = {
            name: {"requests": [asdict(r) for r in group.requests], "at_once": group.at_once}
            for name, group in groups.items()
        }
        ended = await self.driver.do("closed", limit_s + _MARGIN_S, groups=wire, limit_s=limit_s)
        return [Ended(**each) for each in ended]

    async def open(
        self, arrivals: Sequence[tuple[float, BenchRequest]], deadline_s: float
    ) -> list[Ended]:
        """Send each at its time; it has `deadline_s` from then on."""
        wire = [{"at_s": at, "request": asdict(request)} for at, request in arrivals]
        last = arrivals[-1][0] if arrivals else 0.0
        ended = await self.driver.do(
            "open", last + deadline_s + _MARGIN_S, arrivals=wire, deadline_s=deadline_s
        )
        return [Ended(**each) for each in ended]

    async def warm_up(self) -> None:
        """Open every connection."""
        lengths = [Length(16, 2)]
        groups = {
            str(i): Group(self.requests(lengths * 2, i), 2) for i in range(self.setup.decodes)
        }
        for each in await self.closed(groups, ANSWER_S):
            if each.fault:
                raise WorkerLost(f"the warm-up failed: {each.fault}")

    async def behave(self, decode: int, manners: Manners) -> None:
        """How one D treats Allocates from now on."""
        await self.decodes[decode].do("behave", manners=asdict(manners))

    async def settle(self) -> None:
        """Wait until every block is free again on every P and D, as they say themselves.
        BlocksLost."""
        until = time.monotonic() + ANSWER_S
        for worker in (*self.prefills, *self.decodes):
            while held := await _held(worker.endpoint):
                if time.monotonic() > until:
                    raise BlocksLost(f"{worker.role} at {worker.endpoint} still has {held}")
                await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def running_system(setup: Setup) -> AsyncIterator[System]:
    """Start it, warm it up, and stop it; at the end every block must be back."""
    async with contextlib.AsyncExitStack() as stack:

        async def launch(role: str, many: int = 1) -> list[WorkerProcess]:
            workers = [await WorkerProcess.launch(role) for _ in range(many)]
            for worker in workers:
                stack.push_async_callback(worker.stop)
            return workers

        # They are stopped in the opposite order: who calls goes before who is called.
        decodes = await launch("decode", setup.decodes)
        prefills = await launch("prefill", setup.prefills)
        routers = await launch("router", int(setup.router))
        (driver,) = await launch("driver")
        await _start_engines(setup, prefills, decodes)
        ends = [p.endpoint for p in prefills], [d.endpoint for d in decodes]
        for router in routers:
            await router.start(prefill=ends[0], decode=ends[1], **setup.common())
            await _until_ready(router)
        through = routers[0].endpoint if routers else ""
        await driver.start(prefill=ends[0], router=through)
        system = System(setup, prefills, decodes, driver)
        await system.warm_up()
        yield system
        await system.settle()


async def _start_engines(
    setup: Setup, prefills: Sequence[WorkerProcess], decodes: Sequence[WorkerProcess]
) -> None:
    zmq = setup.row in THREADS or setup.row is Row.ZMQ_ASYNC
    await asyncio.gather(
        *(d.start(name=f"d{i}", zmq=zmq, **setup.common()) for i, d in enumerate(decodes))
    )
    routers = {decode.endpoint: decode.about["router"] for decode in decodes}
    common = setup.common()
    common["settings"] |= setup.prefill_settings
    row = setup.row.value
    await asyncio.gather(
        *(p.start(name=f"p{i}", row=row, routers=routers, **common) for i, p in enumerate(prefills))
    )


async def _until_ready(router: WorkerProcess) -> None:
    until = time.monotonic() + ANSWER_S
    while not await router.do("ready"):
        if time.monotonic() > until:
            raise WorkerLost("the router does not find its instances")
        await asyncio.sleep(_LOOK_S)


async def _held(endpoint: str) -> str:
    """The blocks of an instance that are neither free nor cached, and its transfers, in words;
    empty when there are none. WorkerLost."""
    async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            answer = await stub.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            text = f"{endpoint} does not tell of its blocks: {rpc.read_error(error)}"
            raise WorkerLost(text) from error
    unheld = (admin_pb2.BLOCK_STATE_FREE, admin_pb2.BLOCK_STATE_CACHED)
    held = [
        f"{count.blocks} blocks {admin_pb2.BlockState.Name(count.state)}"
        for count in answer.server.blocks
        if count.state not in unheld and count.blocks
    ]
    flying = sum(count.transfers for count in answer.server.transfers)
    return ", ".join([*held, *([f"{flying} transfers"] if flying else [])])
