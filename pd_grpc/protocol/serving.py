"""The control server every instance has: health, reflection and channelz beside its own services,
readiness, and an end that leaves no handler behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import ServerConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.interception import ServerInterceptor, Wire
from pd_grpc.protocol.life_log import STOPPING
from pd_grpc.protocol.unforeseen import Unforeseen
from pd_grpc.telemetry.rpc_server import shape_of

_CHANNELZ = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name

ENDLESS_METHODS = frozenset(
    {
        f"/{health.SERVICE_NAME}/Watch",
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
        "/pd_grpc.v1.AdminService/WatchTransfers",
    }
)
"""Calls that last until one side leaves. A stopping server ends them at once instead of giving them
its grace, which is for work."""

LAST_WORD_S = 0.5
"""How long a stopping server waits for the readers of endless calls to take its last word. One that
has stopped reading would otherwise hold it for the whole grace."""

_Context = grpc.aio.ServicerContext[Any, Any]
_Behaviour = Callable[[Any, _Context], Any]


class HandlerRegistry(ServerInterceptor):
    """Knows every handler that runs, so that a stop can wait for the last `finally`.

    grpc's own stop may return before an aborted handler has cleaned up. Handlers that are
    generators are run inside their call's task, for their clean-up would otherwise wait for the
    garbage collector when the call is cancelled.
    """

    def __init__(self, wire: Wire | None = None) -> None:
        self._wire = wire or Wire()
        self._endless = ENDLESS_METHODS
        self._running: dict[asyncio.Task[Any], str] = {}
        self._ending = False

    @property
    def running(self) -> int:
        """Calls whose handler has not cleaned up, or whose status is still on its way out."""
        return len(self._running)

    async def drained(self) -> None:
        """Wait until no call runs."""
        while self._running:
            await asyncio.wait(list(self._running))

    async def work_done(self) -> None:
        """Wait until none but endless calls run."""
        while work := [task for task, method in self._running.items() if not self._lasts(method)]:
            await asyncio.wait(work)

    def end_endless(self) -> None:
        """End the calls that would never end of themselves, with DRAINING; later ones likewise."""
        self._ending = True
        for task, method in self._running.items():
            if self._lasts(method):
                task.cancel()

    def _lasts(self, method: str) -> bool:
        return method in self._endless

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # an unknown method: grpc answers UNIMPLEMENTED
        shape = shape_of(handler)
        behaviour = getattr(handler, shape)
        if not (iscoroutinefunction(behaviour) or isasyncgenfunction(behaviour)):
            return handler  # what a servicer leaves out: the generated code answers UNIMPLEMENTED
        make = getattr(grpc, f"{shape}_rpc_method_handler")
        return make(
            self._registered(handler_call_details.method, behaviour),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _registered(self, method: str, behaviour: _Behaviour) -> _Behaviour:
        run = _as_coroutine(behaviour) if isasyncgenfunction(behaviour) else behaviour
        endless = self._lasts(method)

        async def handle(request: Any, context: _Context) -> Any:
            if endless and self._ending:
                await rpc.abort(context, _STOPPING)
            task = asyncio.current_task()
            assert task is not None
            self._running[task] = method
            task.add_done_callback(self._running.pop)
            try:
                async with Unforeseen(self._wire.log, method, context):
                    return await run(request, context)
            except asyncio.CancelledError:
                if not endless or not self._ending or context.cancelled():
                    raise
                await rpc.abort(context, _STOPPING)

        return handle


_STOPPING = Fault(Reason.DRAINING, "the server is stopping")


def _as_coroutine(
    generate: Callable[[Any, _Context], AsyncGenerator[Any, None]],
) -> Callable[[Any, _Context], Awaitable[None]]:
    async def write_all(request: Any, context: _Context) -> None:
        async with contextlib.aclosing(generate(request, context)) as responses:
            async for response in responses:
                await rpc.write(context, response)

    return write_all


class ControlServer:
    """An instance's control endpoint. To be made and used on the loop that serves it.

    Add servicers to `server`, then `start`. `service_names` are the full names of those services:
    reflection lists them, and health answers each of them with the instance's readiness.
    """

    def __init__(
        self,
        config: ServerConfig,
        role: str,
        service_names: Sequence[str],
        wire: Wire | None = None,
    ) -> None:
        self._config = config
        self._role = role
        self._service_names = tuple(service_names)
        self._port = 0
        self._ready = False
        self._reason = "starting"
        self.on_readiness: Callable[[bool, str], None] = lambda ready, reason: None
        """Hears whether it takes new requests, and why not, each time that is said."""
        self._changed = asyncio.Event()
        self._stopping = False
        self._publisher: asyncio.Task[None] | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self.handlers = HandlerRegistry(wire)
        self.server = grpc.aio.server(
            interceptors=(wire or Wire()).around(self.handlers), options=rpc.server_options(config)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        channelz.add_channelz_servicer(self.server)  # type: ignore[arg-type]
        builtin = (health.SERVICE_NAME, reflection.SERVICE_NAME, _CHANNELZ)
        reflection.enable_server_reflection((*self._service_names, *builtin), self.server)

    @property
    def port(self) -> int:
        """The control port; 0 until bound."""
        return self._port

    @property
    def endpoint(self) -> str:
        """host:port that others reach it at."""
        return self._config.advertise or rpc.address(self._config.host, self._port)

    @property
    def name(self) -> str:
        """Name of the instance: the configured one, or role-port."""
        return self._config.name or f"{self._role}-{self._port}"

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        return self._ready

    @property
    def reason(self) -> str:
        """Why it does not; empty when it does."""
        return self._reason

    def bind(self) -> int:
        """Take the port, so that endpoint and name are known before the start. PortInUse."""
        if not self._port:
            self._port = rpc.bind(self.server, self._config.host, self._config.port)
        return self._port

    async def start(self) -> None:
        """Serve: alive at once, ready when `set_ready` says so. PortInUse if the port is taken."""
        self.bind()
        await self._publish()
        await self.server.start()
        self._publisher = asyncio.create_task(self._publish_changes(), name="readiness")

    def set_ready(self, ready: bool, reason: str = "") -> None:
        """Say whether it takes new requests, and why not. A stopping server stays not ready."""
        if self._stopping:
            return
        self._ready = ready
        self._reason = "" if ready else reason
        self.on_readiness(ready, self._reason)
        self._changed.set()

    async def stop(self, grace_s: float) -> None:
        """Turn not ready, refuse what is new, let handlers finish for `grace_s`, cancel the others.

        Returns when the last handler has cleaned up.
        """
        self.set_ready(False, STOPPING)
        self._stopping = True
        self._changed.set()
        if self._publisher is not None:
            await self._publisher
        self.handlers.end_endless()
        # grpc cancels what is left after the grace, once: a second cancel would cut clean-up short.
        stopped = asyncio.create_task(self.server.stop(grace_s))
        work = asyncio.create_task(self.handlers.work_done())
        await asyncio.wait((stopped, work), return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            await asyncio.wait((stopped,), timeout=LAST_WORD_S)
            await self.server.stop(None)
        await asyncio.gather(stopped, work, self.handlers.drained())

    async def _publish_changes(self) -> None:
        while not self._stopping:
            await self._changed.wait()
            self._changed.clear()
            await self._publish()

    async def _publish(self) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if self._ready else response.NOT_SERVING
        for service in self._service_names:
            await self._health.set(service, status)
