"""Puts the router together and serves it."""

from __future__ import annotations

import asyncio
import logging

from opentelemetry.sdk.trace import TracerProvider

from pd_grpc.engine.base import Tokenizer
from pd_grpc.protocol.admin import AdminService, ChangeFeed
from pd_grpc.protocol.clock import Clock, SystemClock
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.refs import mint_epoch
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.router.admin import RouterAdmin
from pd_grpc.router.discovery import Discovery
from pd_grpc.router.in_flight import InFlight
from pd_grpc.router.policies import LeastLoad
from pd_grpc.router.runtime import Routing
from pd_grpc.router.service import RouterService
from pd_grpc.telemetry.tracing import Tracing
from pd_grpc.v1 import admin_pb2_grpc, inference_pb2_grpc, types_pb2

_log = logging.getLogger("pd_grpc.router.server")

SERVICES = ("pd_grpc.v1.InferenceService", "pd_grpc.v1.AdminService")


class RouterServer:
    """A router. `drained` is set once it has drained and stopped, whoever asked for it."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        clock: Clock,
        tracer_provider: TracerProvider | None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._control = ControlServer(config, "router", SERVICES)
        self._control.bind()
        self.instance = types_pb2.Instance(
            name=self._control.name, epoch=mint_epoch(clock), role=types_pb2.ROLE_ROUTER
        )
        self._changes = ChangeFeed()
        self.in_flight = InFlight(config, clock, self._changes)
        self.discovery = Discovery(config, self._update_readiness)
        self._tracing = Tracing(clock, self.instance.name, "router", tracer_provider)
        self.routing = Routing(
            config,
            clock,
            tokenizer,
            self.discovery,
            LeastLoad(),
            LeastLoad(),
            self.in_flight,
        )
        self.service = RouterService(self.routing, self._tracing)
        self._admin = RouterAdmin(
            config,
            clock,
            self.instance,
            self._control,
            self.discovery,
            self.in_flight,
            self._start_drain,
        )
        self._stopping: asyncio.Task[None] | None = None
        self.drained = asyncio.Event()
        server = self._control.server
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.service, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminService(self._admin, self._changes), server
        )

    @property
    def name(self) -> str:
        """Name of the instance."""
        return str(self.instance.name)

    @property
    def endpoint(self) -> str:
        """host:port that clients reach it at."""
        return self._control.endpoint

    async def start(self) -> None:
        """Serve, and look for the instances. PortInUse if the port is taken."""
        await self._control.start()
        self._update_readiness()
        self.discovery.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """Take nothing new, let what runs finish for `grace_s` (None: `drain_s`), then end it."""
        if self._stopping is None:
            self._start_drain(grace_s)
        assert self._stopping is not None
        await self._stopping

    def _start_drain(self, deadline_s: float | None) -> None:
        if self._stopping is not None:
            return
        grace_s = self._config.drain_s if deadline_s is None else deadline_s
        self.service.draining = self._admin.draining = True
        _log.info("draining for at most %g s", grace_s, extra={"instance": self.name})
        self._stopping = asyncio.create_task(self._stop(grace_s), name="drain")

    async def _stop(self, grace_s: float) -> None:
        """Refuse with DRAINING while requests run; then close the port and end what is left."""
        self._control.set_ready(False, "draining")
        idle = asyncio.create_task(self.in_flight.idle())
        await asyncio.wait([idle], timeout=grace_s)
        idle.cancel()
        self._changes.close()
        await self._control.stop(0)
        await self.discovery.stop()
        self.drained.set()

    def _update_readiness(self) -> None:
        if self._stopping is not None:
            return
        role = self.discovery.missing_role()
        reason = "" if role is None else f"no {role} instance is ready"
        self._control.set_ready(role is None, reason)


async def start_router(
    config: RouterConfig,
    tokenizer: Tokenizer,
    *,
    clock: Clock | None = None,
    tracer_provider: TracerProvider | None = None,
) -> RouterServer:
    """A serving router. It turns ready when an instance of each needed role is. PortInUse."""
    router = RouterServer(config, tokenizer, clock or SystemClock(), tracer_provider)
    await router.start()
    return router
