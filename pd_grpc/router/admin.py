"""What an operator sees of the router and of the instances behind it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import grpc.aio

from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.protocol.span_messages import span_messages
from pd_grpc.protocol.version import VERSION
from pd_grpc.router.discovery import Discovery, InstanceView
from pd_grpc.router.in_flight import InFlight
from pd_grpc.router.recovery import Kind, Recovery
from pd_grpc.telemetry.recent import RecentTraces
from pd_grpc.v1 import admin_pb2, types_pb2

_PEER_INFO_S = 1.0
"""How long an instance may take to say how it is before it counts as unreachable."""


class RouterAdmin:
    """The router's `AdminView`. `drain` is the server's own."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        instance: types_pb2.Instance,
        control: ControlServer,
        discovery: Discovery,
        in_flight: InFlight,
        recovery: Recovery,
        traces: RecentTraces,
        drain: Callable[[float | None], int],
    ) -> None:
        self._config = config
        self._clock = clock
        self._instance = instance
        self._control = control
        self._discovery = discovery
        self._in_flight = in_flight
        self._recovery = recovery
        self._traces = traces
        self._drain = drain
        self._started = clock.now()
        self.draining = False

    def server_info(self) -> admin_pb2.ServerInfo:
        models = [view.model for view in self._discovery.instances if view.model is not None]
        in_flight = Counter(request.info().state for request in self._in_flight.running())
        return admin_pb2.ServerInfo(
            instance=self._instance,
            endpoint=self._control.endpoint,
            health=self._health(),
            health_reason=self._control.reason,
            version=VERSION,
            model=models[0].model if models else "",
            uptime=duration(self._clock.now() - self._started),
            transfers=_counts(in_flight),
            ended=_counts(self._in_flight.ended_counts),
            late_events=self._in_flight.late_events,
            recovery=self._recovered(),
            settings={name: str(value) for name, value in self._config.model_dump().items()},
        )

    async def peer_infos(self) -> list[admin_pb2.ServerInfo]:
        return list(await asyncio.gather(*map(self._ask, self._discovery.instances)))

    def transfers(self) -> list[admin_pb2.TransferInfo]:
        return [request.info() for request in self._in_flight.running()]

    def transfer(self, transfer_id: str, attempt: int) -> admin_pb2.TransferInfo | None:
        running = self._in_flight.find(transfer_id, attempt)
        if running is not None:
            return running.info()
        return self._in_flight.ended(transfer_id, attempt)

    def spans(self, wanted: str) -> list[admin_pb2.Span]:
        return span_messages(self._traces.find(wanted))

    async def peer_spans(self, trace_id: str) -> list[admin_pb2.Span]:
        found = await asyncio.gather(
            *(self._ask_spans(view, trace_id) for view in self._discovery.instances)
        )
        return [span for spans in found for span in spans]

    def release(self, transfer_id: str, attempt: int, reason: str) -> admin_pb2.TransferInfo | None:
        running = self._in_flight.find(transfer_id, attempt)
        if running is None:
            return self._in_flight.ended(transfer_id, attempt)
        text = f"released by an operator: {reason}" if reason else "released by an operator"
        running.fail(Fault(Reason.RELEASED, text))
        return running.info()

    def drain(self, deadline_s: float | None) -> int:
        return self._drain(deadline_s)

    def _health(self) -> admin_pb2.Health:
        if self.draining:
            return admin_pb2.HEALTH_DRAINING
        return admin_pb2.HEALTH_SERVING if self._control.ready else admin_pb2.HEALTH_NOT_SERVING

    def _recovered(self) -> admin_pb2.Recovery:
        counts = self._recovery.counts
        return admin_pb2.Recovery(
            retries=counts.tried[Kind.RETRY].total(),
            continuations=counts.tried[Kind.CONTINUATION].total(),
            refused=counts.refused.total(),
            budget_left=int(self._recovery.budget.tokens),
        )

    async def _ask(self, view: InstanceView) -> admin_pb2.ServerInfo:
        try:
            answer = await view.admin.GetServerInfo(
                admin_pb2.GetServerInfoRequest(), timeout=_PEER_INFO_S
            )
        except grpc.aio.AioRpcError as error:
            return admin_pb2.ServerInfo(
                instance=types_pb2.Instance(name=view.name, epoch=view.epoch, role=view.role),
                endpoint=view.endpoint,
                health=admin_pb2.HEALTH_UNREACHABLE,
                health_reason=f"{error.code().name}: {error.details()}",
            )
        info: admin_pb2.ServerInfo = answer.server
        return info

    async def _ask_spans(self, view: InstanceView, trace_id: str) -> list[admin_pb2.Span]:
        """An instance that has none, or does not answer, has no part in what is shown."""
        request = admin_pb2.GetTraceRequest(id=trace_id)
        try:
            answer = await view.admin.GetTrace(request, timeout=_PEER_INFO_S)
        except grpc.aio.AioRpcError:
            return []
        return list(answer.spans)


def _counts(counts: Counter[types_pb2.TransferState]) -> list[admin_pb2.TransferCount]:
    return [
        admin_pb2.TransferCount(state=state, transfers=number)
        for state, number in sorted(counts.items())
    ]
