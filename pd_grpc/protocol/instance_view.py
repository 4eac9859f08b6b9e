"""What P and D show of themselves alike."""

from __future__ import annotations

from pd_grpc.protocol.serving import ControlServer
from pd_grpc.protocol.span_messages import span_messages
from pd_grpc.telemetry.recent import RecentTraces
from pd_grpc.v1 import admin_pb2


class InstanceView:
    """The part of an AdminView that is the same on both: nobody is behind either."""

    def __init__(self, control: ControlServer, traces: RecentTraces) -> None:
        self._control = control
        self._traces = traces

    async def peer_infos(self) -> list[admin_pb2.ServerInfo]:
        """See `AdminView.peer_infos`."""
        return []

    def spans(self, wanted: str) -> list[admin_pb2.Span]:
        """See `AdminView.spans`."""
        return span_messages(self._traces.find(wanted))

    async def peer_spans(self, trace_id: str) -> list[admin_pb2.Span]:
        """See `AdminView.peer_spans`."""
        return []

    def _health(self, draining: bool) -> admin_pb2.Health:
        if draining:
            return admin_pb2.HEALTH_DRAINING
        return admin_pb2.HEALTH_SERVING if self._control.ready else admin_pb2.HEALTH_NOT_SERVING
