"""D as an operator sees it."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from pd_grpc.decode.actions import Changed
from pd_grpc.decode.deadlines import OfTransfer, TransferTimer
from pd_grpc.decode.events import DrainRequested, OperatorReleased
from pd_grpc.decode.runtime import DecodeRuntime
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Ended, Transfer
from pd_grpc.protocol.admin import ChangeFeed
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.instance_view import InstanceView
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.protocol.version import VERSION
from pd_grpc.telemetry.recent import RecentTraces
from pd_grpc.v1 import admin_pb2

_WAITS_FOR = {
    DecodeState.EXPECTED: "Allocate from the prefill",
    DecodeState.WAITING: "free blocks",
    DecodeState.RESERVED: "KV from the prefill",
    DecodeState.RECEIVING: "the rest of the KV",
    DecodeState.READY: "the first token or the client",
    DecodeState.DECODING: "the engine",
    DecodeState.PREEMPTED: "free blocks, then the engine",
}


class DecodeView(InstanceView):
    """AdminView of D."""

    def __init__(
        self,
        config: DecodeConfig,
        model: str,
        runtime: DecodeRuntime,
        control: ControlServer,
        clock: Clock,
        changes: ChangeFeed,
        traces: RecentTraces,
    ) -> None:
        super().__init__(control, traces)
        self._config = config
        self._model = model
        self._runtime = runtime
        self._clock = clock
        self._changes = changes
        self._started = clock.now()

    def server_info(self) -> admin_pb2.ServerInfo:
        """This instance."""
        machine = self._runtime.machine
        ledger = machine.ledger
        info = admin_pb2.ServerInfo(
            instance=machine.instance,
            endpoint=self._control.endpoint,
            health=self._health(ledger.draining),
            health_reason=self._control.reason,
            version=VERSION,
            model=self._model,
            uptime=duration(self._clock.now() - self._started),
            late_events=ledger.late_events,
            settings={name: str(value) for name, value in self._config},
        )
        for block_state, blocks in machine.pool.counts().items():
            if blocks:
                name = f"BLOCK_STATE_{block_state.name}"
                info.blocks.add(state=admin_pb2.BlockState.Value(name), blocks=blocks)
        for state, number in ledger.counts.items():
            if number:
                target = info.ended if state.terminal else info.transfers
                target.add(state=state.wire, transfers=number)
        return info

    def transfers(self) -> list[admin_pb2.TransferInfo]:
        """In flight, oldest first."""
        live = self._runtime.machine.ledger.transfers.values()
        return [self._describe(t) for t in sorted(live, key=lambda t: t.created)]

    def transfer(self, transfer_id: str, attempt: int) -> admin_pb2.TransferInfo | None:
        """One, ended ones while they are remembered."""
        machine, now = self._runtime.machine, self._clock.now()
        live = machine.find(transfer_id, attempt)
        if live is not None:
            return self._describe(live)
        attempt = attempt or machine.ledger.tombstones.newest(transfer_id, now)
        key = TransferKey(transfer_id, attempt)
        ended = machine.ledger.tombstones.get(key, now)
        return None if ended is None else self._describe_ended(key, ended)

    def release(self, transfer_id: str, attempt: int, reason: str) -> admin_pb2.TransferInfo | None:
        """End one by hand."""
        if self._runtime.machine.find(transfer_id, attempt) is not None:
            self._runtime.feed(OperatorReleased(transfer_id, attempt, reason))
        return self.transfer(transfer_id, attempt)

    def drain(self, deadline_s: float | None) -> int:
        """Take nothing new."""
        seconds = self._config.drain_s if deadline_s is None else deadline_s
        self._control.set_ready(False, "draining")
        self._runtime.feed(DrainRequested(seconds))
        return len(self._runtime.machine.ledger.transfers)

    def changed(self, change: Changed) -> None:
        """Tell those who watch."""
        if not self._changes.watched:
            return
        ended = change.ended
        info = self.transfer(*change.key)
        if ended is not None:
            info = self._describe_ended(change.key, ended)
        if info is not None:
            self._changes.publish(info)

    def _describe(self, transfer: Transfer) -> admin_pb2.TransferInfo:
        now = self._clock.now()
        timer, at = self._next_timer(transfer)
        leg, client = transfer.prefill, transfer.client
        prompt = 0 if leg is None else leg.request.prompt_tokens
        return admin_pb2.TransferInfo(
            ref=self._runtime.machine.ledger.ref(transfer.key),
            request_id=transfer.request_id,
            state=transfer.state.wire,
            age=duration(now - transfer.created),
            state_age=duration(now - transfer.since),
            holder=self._holder(transfer),
            blocks=0 if transfer.holding is None else len(transfer.holding.blocks),
            waits_for=self._waits_for(transfer),
            next_timer=timer,
            next_timer_in=duration(at - now) if timer else Duration(),
            peer="" if leg is None else leg.owner.name,
            prompt_tokens=prompt if client is None else len(client.prompt),
            generated_tokens=len(transfer.output) if client is None else client.stop.generated,
        )

    def _waits_for(self, transfer: Transfer) -> str:
        """Of several shards those are named that have not got all of their KV."""
        said = _WAITS_FOR[transfer.state]
        shards = self._runtime.machine.ledger.sessions.shards
        if not transfer.receiving or transfer.kv_complete or len(shards) == 1:
            return said
        lacking = [str(i) for i in range(len(shards)) if i not in transfer.complete_shards]
        return f"{said}, on shard {', '.join(lacking)} of {len(shards)}"

    def _describe_ended(self, key: TransferKey, ended: Ended) -> admin_pb2.TransferInfo:
        now = self._clock.now()
        return admin_pb2.TransferInfo(
            ref=key.ref(self._runtime.machine.instance.epoch),
            request_id=ended.request_id,
            state=ended.state.wire,
            age=duration(now - ended.created),
            state_age=duration(now - ended.ended),
            last_error=None if ended.fault is None else ended.fault.status(),
            peer=ended.peer,
            prompt_tokens=ended.prompt_tokens,
            generated_tokens=ended.generated_tokens,
        )

    def _next_timer(self, transfer: Transfer) -> tuple[str, float]:
        ledger = self._runtime.machine.ledger
        times = {
            timer.value: ledger.timers.at(OfTransfer(transfer.grant_id, timer))
            for timer in TransferTimer
        }
        times["lease"] = ledger.leases.ends_at(transfer.grant_id)
        known = [(at, name) for name, at in times.items() if at is not None]
        if not known:
            return "", 0.0
        at, name = min(known)
        return name, at

    def _holder(self, transfer: Transfer) -> str:
        if transfer.handed_off or transfer.local:
            return "the client's stream" if transfer.client is not None else "the attach timer"
        if transfer.grant_id in self._runtime.machine.ledger.leases:
            return f"the lease of prefill {transfer.prefill.owner.name}" if transfer.prefill else ""
        if transfer.prefill is not None and transfer.prefill.calls:
            return f"an Allocate of prefill {transfer.prefill.owner.name}"
        return "the client's stream"
