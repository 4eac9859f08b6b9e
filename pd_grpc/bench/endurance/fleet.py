"""A router with P and D behind it, each a process that can be killed, stopped and brought back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import psutil

from pd_grpc.bench.endurance.links import Link, owner_among
from pd_grpc.bench.processes import ANSWER_S, WorkerLost, WorkerProcess
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc

ROUTER = "router"
_LOOK_S = 0.02
_WORKERS = {"prefill": "plain-prefill", "decode": "plain-decode"}


@dataclass(frozen=True)
class FleetPlan:
    """What to start. Settings are those of the configuration, by name; `links` puts a link before
    every port, without which nothing can be cut. `start_s` is how long an instance may take to
    load."""

    prefills: int = 2
    decodes: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefill_settings: Mapping[str, Any] = field(default_factory=dict)
    decode_settings: Mapping[str, Any] = field(default_factory=dict)
    router_settings: Mapping[str, Any] = field(default_factory=dict)
    links: bool = False
    start_s: float = ANSWER_S


@dataclass
class Unit:
    """A P or a D, whichever process it is now."""

    name: str
    role: str
    settings: dict[str, Any]
    links: dict[str, Link]
    """Before its `endpoint` and, of a D, its `bulk` port; empty without links."""
    worker: WorkerProcess | None = None

    @property
    def process(self) -> WorkerProcess:
        """The process it is now; WorkerLost while it is none."""
        if self.worker is None:
            raise WorkerLost(f"{self.name} does not run")
        return self.worker

    @property
    def address(self) -> str:
        """Where the router reaches it."""
        return self.links["endpoint"].endpoint if self.links else self.process.endpoint


class Fleet:
    """A running one; see `running_fleet`. To be used on one loop."""

    def __init__(self, plan: FleetPlan) -> None:
        self._plan = plan
        self._router: WorkerProcess | None = None
        self._asking_router = asyncio.Lock()
        self._spares: dict[str, WorkerProcess] = {}
        self.units: dict[str, Unit] = {}

    @property
    def router(self) -> WorkerProcess:
        """The router's process."""
        assert self._router is not None
        return self._router

    def pids(self) -> dict[str, int]:
        """Process ids by name: `router`, `p0`, `d0` and so on."""
        running = [(name, unit.worker) for name, unit in self.units.items()]
        found = {name: worker.pid for name, worker in running if worker is not None}
        return found if self._router is None else {**found, ROUTER: self._router.pid}

    async def start(self) -> None:
        """Start everything; returns when the router takes requests. WorkerLost."""
        plan = self._plan
        owner = owner_among(self.pids)
        names = [("prefill", f"p{i}") for i in range(plan.prefills)]
        names += [("decode", f"d{i}") for i in range(plan.decodes)]
        for role, name in names:
            own = plan.prefill_settings if role == "prefill" else plan.decode_settings
            # Bytes in chunks, for what is harmed are the lines that they go by.
            usual = {"log_level": "error", "transports": ["inline"]}
            settings = {**usual, **plan.settings, **own, "name": name}
            self.units[name] = unit = Unit(name, role, settings, {})
            for port in ("endpoint", "bulk")[: 2 if role == "decode" else 1] * plan.links:
                unit.links[port] = link = Link(owner)
                await link.start()
            if unit.links:
                settings["advertise"] = unit.links["endpoint"].endpoint
            if "bulk" in unit.links:
                settings["bulk_advertise"] = unit.links["bulk"].endpoint
        self._router = await WorkerProcess.launch("plain-router")
        units = list(self.units.values())
        for unit in units:
            unit.worker = await WorkerProcess.launch(_WORKERS[unit.role])
        await asyncio.gather(*(self._begin(unit) for unit in units))
        addresses = {
            role: [u.address for u in units if u.role == role] for role in ("prefill", "decode")
        }
        settings = {
            "log_level": "error",
            "request_budget_s": plan.settings.get("request_budget_s", 300.0),
            **plan.router_settings,
            **addresses,
        }
        await self._router.start(plan.start_s, settings=settings)
        await self.until_ready()
        for role in _WORKERS:
            self._spares[role] = await WorkerProcess.launch(_WORKERS[role])

    async def stop(self) -> None:
        """End every process, running, stopped or spare."""
        workers = [unit.worker for unit in self.units.values()]
        for worker in [self._router, *workers, *self._spares.values()]:
            if worker is not None:
                worker.signal(signal.SIGCONT)
                with contextlib.suppress(WorkerLost):
                    await worker.stop()
        for unit in self.units.values():
            for link in unit.links.values():
                await link.stop()

    # --- what is done to it -----------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        """End its process at once, as SIGKILL does."""
        worker = self.units[name].process
        self.units[name].worker = None
        worker.signal(signal.SIGKILL)
        await worker.ended()

    async def drain(self, name: str, deadline_s: float) -> int:
        """Drain it and let its process end; the blocks that had not come back by then."""
        worker = self.units[name].process
        held: int = await worker.do("drain", deadline_s + ANSWER_S, deadline_s=deadline_s)
        self.units[name].worker = None
        await worker.stop()
        return held

    async def bring_back(self, name: str) -> None:
        """Start it again, under its old address. It has been loaded before, but for a model."""
        unit = self.units[name]
        unit.worker = self._spares.pop(unit.role)
        self._spares[unit.role] = await WorkerProcess.launch(_WORKERS[unit.role])
        await self._begin(unit)

    def freeze(self, name: str) -> None:
        """Stop its process, whose sockets stay open, as SIGSTOP does."""
        self.units[name].process.signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let it go on."""
        self.units[name].process.signal(signal.SIGCONT)

    # --- what is seen of it -----------------------------------------------------------------------

    async def until_ready(self) -> None:
        """Wait until the router takes every instance, in the process that it is now, for ready.
        WorkerLost when it does not."""
        until = time.monotonic() + ANSWER_S
        while missing := await self._not_ready():
            if time.monotonic() > until:
                raise WorkerLost(f"the router does not find {', '.join(missing)}")
            await asyncio.sleep(_LOOK_S)

    async def readiness_changes(self) -> list[tuple[float, str, bool]]:
        """When each instance turned ready (True) or not for the router, in monotonic seconds, since
        this was asked last."""
        async with self._asking_router:
            changes = await self.router.do("changes")
        return [(at, name, ready) for at, name, ready in changes]

    async def server_info(self, name: str) -> admin_pb2.ServerInfo:
        """What an instance or the router says of itself. WorkerLost when it does not answer."""
        worker = self.router if name == ROUTER else self.units[name].process
        async with rpc.aio_channel(worker.endpoint, Timeouts(), Sizes()) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            try:
                answer = await stub.GetServerInfo(
                    admin_pb2.GetServerInfoRequest(), timeout=ANSWER_S
                )
            except grpc.aio.AioRpcError as error:
                raise WorkerLost(f"{name} does not say how it is: {error.details()}") from error
        info: admin_pb2.ServerInfo = answer.server
        return info

    def memory_kib(self) -> dict[int, tuple[str, float]]:
        """Resident memory and name of each running process, by its id."""
        found = {}
        for name, pid in self.pids().items():
            with contextlib.suppress(psutil.Error):
                found[pid] = (name, psutil.Process(pid).memory_info().rss / 1024)
        return found

    async def _begin(self, unit: Unit) -> None:
        worker = unit.process
        await worker.start(self._plan.start_s, settings=unit.settings)
        for port, link in unit.links.items():
            link.upstream = worker.about[port]
        if not unit.links:
            # It comes back where it was.
            for port, setting in (("endpoint", "port"), ("bulk", "bulk_port")):
                if port in worker.about:
                    unit.settings[setting] = int(worker.about[port].rpartition(":")[2])

    async def _not_ready(self) -> Sequence[str]:
        async with self._asking_router:
            seen = {each["name"]: each for each in await self.router.do("instances")}
        return [
            name
            for name, unit in self.units.items()
            if name not in seen
            or not seen[name]["ready"]
            or unit.worker is None
            or seen[name]["epoch"] != unit.worker.about["epoch"]
        ]


@contextlib.asynccontextmanager
async def running_fleet(plan: FleetPlan) -> AsyncIterator[Fleet]:
    """Start it, and stop it at the end."""
    fleet = Fleet(plan)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.stop()
