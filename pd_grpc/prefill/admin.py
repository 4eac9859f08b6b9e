"""What P shows of itself to an operator."""

from __future__ import annotations

from collections import Counter

from pd_grpc.prefill.actions import Changed
from pd_grpc.prefill.events import DrainRequested, OperatorRelease, PauseRequested
from pd_grpc.prefill.runtime import PrefillRuntime
from pd_grpc.prefill.states import PrefillState
from pd_grpc.prefill.view import lane_info
from pd_grpc.protocol.admin import ChangeFeed
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.instance_view import InstanceView
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.protocol.version import VERSION
from pd_grpc.telemetry.recent import RecentTraces
from pd_grpc.v1 import admin_pb2


class PrefillView(InstanceView):
    """AdminView of P."""

    def __init__(
        self,
        config: PrefillConfig,
        model: str,
        runtime: PrefillRuntime,
        control: ControlServer,
        clock: Clock,
        changes: ChangeFeed,
        traces: RecentTraces,
    ) -> None:
        super().__init__(control, traces)
        self._config = config
        self._model = model
        self._runtime = runtime
        self._machine = runtime.machine
        self._clock = clock
        self._changes = changes
        self._started = clock.now()

    def server_info(self) -> admin_pb2.ServerInfo:
        """This instance."""
        requests, now = self._machine.requests, self._clock.now()
        info = admin_pb2.ServerInfo(
            instance=self._machine.instance,
            endpoint=self._control.endpoint,
            health=self._health(self._machine.draining),
            health_reason=self._control.reason,
            version=VERSION,
            model=self._model,
            uptime=duration(now - self._started),
            late_events=requests.late_events,
            settings={name: str(value) for name, value in self._config},
            prepare=[lane_info(lane) for lane in self._machine.placement.pool.lanes(now)],
            paused=self._machine.paused,
        )
        for block_state, blocks in self._machine.pool.counts().items():
            if blocks:
                name = f"BLOCK_STATE_{block_state.name}"
                info.blocks.add(state=admin_pb2.BlockState.Value(name), blocks=blocks)
        flying: Counter[PrefillState] = Counter(r.state for r in requests.in_flight.values())
        for counts, target in (
            (flying, info.transfers),
            (requests.ended_by_state, info.ended),
        ):
            for state, number in counts.items():
                target.add(state=state.wire, transfers=number)
        return info

    def transfers(self) -> list[admin_pb2.TransferInfo]:
        """In flight, oldest first."""
        return self._machine.transfers(self._clock.now())

    def transfer(self, transfer_id: str, attempt: int) -> admin_pb2.TransferInfo | None:
        """One, ended ones while they are remembered."""
        return self._machine.transfer(transfer_id, attempt, self._clock.now())

    def release(self, transfer_id: str, attempt: int, reason: str) -> admin_pb2.TransferInfo | None:
        """End one by hand."""
        self._runtime.feed(OperatorRelease(transfer_id, attempt, reason))
        return self.transfer(transfer_id, attempt)

    def drain(self, deadline_s: float | None) -> int:
        """Take nothing new."""
        seconds = self._config.drain_s if deadline_s is None else deadline_s
        self._control.set_ready(False, "draining")
        self._runtime.feed(DrainRequested(seconds))
        return len(self._machine.requests.in_flight)

    def pause(self, paused: bool) -> None:
        """Ask for nothing new and compute nothing new, or go on; requests are taken in."""
        self._runtime.feed(PauseRequested(paused))

    def changed(self, change: Changed) -> None:
        """Tell those who watch."""
        if self._changes.watched:
            info = self.transfer(*change.key)
            if info is not None:
                self._changes.publish(info)
