"""Puts the router together and serves it."""

from __future__ import annotations

import asyncio
import math

from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from pd_grpc.engine.base import Tokenizer
from pd_grpc.protocol import interception, rpc
from pd_grpc.protocol.admin import AdminService, ChangeFeed
from pd_grpc.protocol.clock import Clock, SystemClock
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.interception import Interceptors, Wire
from pd_grpc.protocol.life_log import DRAINING, LifeLog
from pd_grpc.protocol.refs import mint_epoch
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.router.admin import RouterAdmin
from pd_grpc.router.discovery import Discovery
from pd_grpc.router.in_flight import InFlight
from pd_grpc.router.metrics import RouterMetrics
from pd_grpc.router.policies import LeastLoad
from pd_grpc.router.recovery import Recovery, RecoveryRules
from pd_grpc.router.recovery_metrics import RecoveryMetrics
from pd_grpc.router.retry_budget import RetryBudget
from pd_grpc.router.routing import Routing
from pd_grpc.router.service import RouterService, the_router_leaves
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.tracing import Tracing
from pd_grpc.v1 import admin_pb2_grpc, inference_pb2_grpc, types_pb2

SERVICES = ("pd_grpc.v1.InferenceService", "pd_grpc.v1.AdminService")


class RouterServer:
    """A router, to be made and used on one loop."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        clock: Clock,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
        interceptors: Interceptors = interception.NONE,
    ) -> None:
        self._config = config
        self._clock = clock
        wire = Wire(interceptors)
        self._control = ControlServer(config, "router", SERVICES, wire)
        self._control.bind()
        self.instance = types_pb2.Instance(
            name=self._control.name, epoch=mint_epoch(clock), role=types_pb2.ROLE_ROUTER
        )
        log = InstanceLog("router", self.instance.name)
        self._life = LifeLog(log)
        self._control.on_readiness = self._life.readiness
        self._changes = ChangeFeed()
        self.in_flight = InFlight(config, clock, self._changes)
        self._tracing = Tracing(
            clock, self.instance.name, "router", tracer_provider, config.traces_kept
        )
        instruments = Instruments(self.instance.name, meter_provider)
        wire.connect(log, self._tracing, instruments)
        self.discovery = Discovery(config, self._update_readiness, log, wire)
        self.routing = Routing(
            self.instance.name,
            log,
            config,
            clock,
            tokenizer,
            self.discovery,
            LeastLoad(),
            LeastLoad(),
            self.in_flight,
            recovery_of(config),
        )
        RecoveryMetrics(instruments, self.routing.recovery)
        metrics = RouterMetrics(instruments, self.in_flight)
        self.service = RouterService(self.routing, self._tracing, metrics)
        self._admin = RouterAdmin(
            config,
            clock,
            self.instance,
            self._control,
            self.discovery,
            self.in_flight,
            self.routing.recovery,
            self._tracing.recent,
            self.drain,
        )
        self._draining: asyncio.Task[None] | None = None
        self._drain_ends = math.inf
        self._drained = asyncio.Event()
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

    @property
    def ready(self) -> bool:
        """Whether it takes requests: an instance of each needed role is ready."""
        return self._control.ready

    async def start(self) -> None:
        """Serve, and look for the instances. PortInUse if the port is taken."""
        await self._control.start()
        self._life.started("router", self.endpoint)
        self._update_readiness()
        self.discovery.start()

    def drain(self, deadline_s: float | None = None) -> int:
        """Refuse what is new with DRAINING and let what runs finish for `deadline_s` (None is
        `drain_s`); returns what runs. Of several deadlines the earliest stands."""
        grace_s = self._config.drain_s if deadline_s is None else deadline_s
        ends = self._clock.now() + grace_s
        if self._drained.is_set() or ends >= self._drain_ends:
            return len(self.in_flight)
        if self._draining is not None:
            self._draining.cancel()
        self.service.draining = self._admin.draining = True
        self._control.set_ready(False, DRAINING)
        self._drain_ends = ends
        self._draining = asyncio.create_task(self._drain(grace_s), name="drain")
        return len(self.in_flight)

    async def drained(self) -> None:
        """Wait until a drain, whoever asked for it, is over: nothing runs or its time has come."""
        await self._drained.wait()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain for at most `grace_s`, then end everything; returns when every handler has cleaned
        up. A drain under way is cut short."""
        self.drain(grace_s)
        await self._drained.wait()
        self._changes.close()
        await self._control.stop(0)
        await self.discovery.stop()
        self._life.stopped()

    async def _drain(self, grace_s: float) -> None:
        idle = asyncio.create_task(self.in_flight.idle())
        try:
            await asyncio.wait([idle], timeout=grace_s)
            self.service.leave()
            for request in self.in_flight.running():
                request.fail(the_router_leaves())
            # Their clients are told; one that reads nothing holds it back no longer than that.
            await asyncio.wait([idle], timeout=rpc.STATUS_READ_S)
        finally:
            idle.cancel()
        self._drained.set()

    def _update_readiness(self) -> None:
        if self._draining is not None:
            return
        role = self.discovery.missing_role()
        reason = "" if role is None else f"no {role} instance is ready"
        self._control.set_ready(role is None, reason)


def recovery_of(config: RouterConfig) -> Recovery:
    """What the requests of a router so configured share to be tried elsewhere."""
    rules = RecoveryRules(
        config.retry, config.continuation, config.retry_attempts, config.retry_wait_s
    )
    return Recovery(rules, RetryBudget(config.retry_burst, config.retry_share))


async def start_router(
    config: RouterConfig,
    tokenizer: Tokenizer,
    *,
    clock: Clock | None = None,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    interceptors: Interceptors = interception.NONE,
) -> RouterServer:
    """A serving router. It turns ready when an instance of each needed role is. Metrics go to the
    process's own provider unless there is another. PortInUse."""
    clock = clock or SystemClock()
    router = RouterServer(config, tokenizer, clock, tracer_provider, meter_provider, interceptors)
    await router.start()
    return router
