"""P in numbers; its prepare pool is `prepare_metrics`."""

from __future__ import annotations

from collections.abc import Mapping

from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import Changed
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.states import TRANSITIONS, PrefillRecord, PrefillState
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import transport_label
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry import names
from pd_grpc.telemetry.instance_metrics import MachineMetrics, stages_ahead
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.v1 import layout_pb2

_STAGES: Mapping[PrefillState, str] = {
    PrefillState.QUEUED: "queue",
    PrefillState.ALLOCATING: "prepare",
    PrefillState.PREPARED: "queue",
    PrefillState.COMPUTING: "compute",
    PrefillState.SENDING: "send",
}
INLINE = layout_pb2.TRANSPORT_INLINE
_AHEAD = stages_ahead(_STAGES, TRANSITIONS)
_WAITING = (PrefillState.QUEUED, PrefillState.ALLOCATING)


class PrefillMetrics(MachineMetrics[TransferKey]):
    """Hears of every change of state, every event and every refusal."""

    def __init__(self, instruments: Instruments, machine: PrefillMachine, clock: Clock) -> None:
        super().__init__(instruments, "prefill", Reason, clock.now)
        self._wasted = instruments.counter(names.METRIC_WASTED_TOKENS)
        self._acked: dict[TransferKey, dict[int, int]] = {}
        requests = self._requests = machine.requests
        self.watch_late_events(lambda: requests.late_events)
        self.watch_pool(machine.pool.counts)
        cache, size = machine.cache, machine.block_size
        self.watch_prefix_cache(
            lambda: cache.asked_blocks * size, lambda: cache.found_blocks * size
        )
        self.watch_queue(lambda: _waiting_tokens(requests.in_flight))

    def changed(self, change: Changed) -> None:
        """A request has entered another state."""
        left = None if change.before is None else _STAGES[change.before]
        self.moved(change.key, left, _AHEAD[change.after], change.fault)
        if change.after is PrefillState.COMPUTING:
            record = self._requests.get(change.key)
            # Where no KV is needed none is on its way.
            if record is not None and record.transport:
                self.transfer_begins(change.key, transport_label(record.transport))
        if change.after.terminal:
            self.transfer_ends(change.key, change.fault)
            self._acked.pop(change.key, None)
        if change.fault is not None:
            self._ended_by(change.fault, change.computed)

    def heard(self, event: ev.Event, at: float) -> None:
        """A shard has acknowledged KV."""
        if isinstance(event, ev.KvAcked) and self.in_flight(event.key):
            of_strands = self._acked.setdefault(event.key, {})
            before = of_strands.get(event.strand, 0)
            of_strands[event.strand] = event.acked_bytes
            news = max(0, event.acked_bytes - before)
            self.verified(news, self._transport(event.key))

    def _transport(self, key: TransferKey) -> str:
        record = self._requests.get(key)
        return transport_label(INLINE if record is None else record.transport)

    def _ended_by(self, fault: Fault, computed: int) -> None:
        if fault.reason is Reason.LEASE_EXPIRED:
            self.lease_expired()
        if computed:
            self._wasted.add(computed, {names.ATTR_METRIC_REASON: fault.reason.value})


def _waiting_tokens(requests: Mapping[TransferKey, PrefillRecord]) -> int:
    # A list is made in one step; the loop's thread may add and remove meanwhile.
    return sum(len(r.tokens) for r in list(requests.values()) if r.state in _WAITING)
