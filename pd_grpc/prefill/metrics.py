"""P in numbers; its prepare pool is `prepare_metrics`."""

from __future__ import annotations

from collections.abc import Mapping

from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import Changed
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.states import PrefillRecord, PrefillState
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry import names
from pd_grpc.telemetry.instance_metrics import OK, InstanceMetrics, TransferMetrics
from pd_grpc.telemetry.instruments import Instruments

_STAGES: Mapping[PrefillState, str] = {
    PrefillState.QUEUED: "queue",
    PrefillState.ALLOCATING: "prepare",
    PrefillState.PREPARED: "queue",
    PrefillState.COMPUTING: "compute",
    PrefillState.SENDING: "send",
}
_WAITING = (PrefillState.QUEUED, PrefillState.ALLOCATING)


class PrefillMetrics:
    """Hears of every change of state, every event and every refusal."""

    def __init__(self, instruments: Instruments, machine: PrefillMachine, clock: Clock) -> None:
        self._clock = clock
        self._instance = InstanceMetrics(instruments, "prefill")
        self._transfer = TransferMetrics(instruments, "prefill")
        self._wasted = instruments.counter(names.METRIC_WASTED_TOKENS)
        self._since: dict[TransferKey, float] = {}
        self._computing: dict[TransferKey, float] = {}
        self._acked: dict[TransferKey, dict[int, int]] = {}
        requests = machine.requests
        self._instance.watch(
            late_events=lambda: requests.late_events,
            blocks=lambda: {
                state.name.lower(): number for state, number in machine.pool.counts().items()
            },
            queued_tokens=lambda: _waiting_tokens(requests.in_flight),
        )

    def changed(self, change: Changed) -> None:
        """A request has entered another state."""
        now = self._clock.now()
        since = self._since.pop(change.key, now)
        outcome = OK if change.fault is None else change.fault.reason.value
        if change.before is not None:
            self._instance.stage(_STAGES[change.before], now - since, outcome)
        if change.after is PrefillState.COMPUTING:
            self._computing[change.key] = now
        if not change.after.terminal:
            self._since[change.key] = now
            return
        began = self._computing.pop(change.key, None)
        if began is not None:
            self._transfer.ended(now - began, outcome)
        self._acked.pop(change.key, None)
        if change.fault is not None:
            self._end_by_fault(change, change.fault)

    def heard(self, event: ev.Event, at: float) -> None:
        """A shard has acknowledged KV."""
        if isinstance(event, ev.KvAcked) and event.key in self._since:
            of_shards = self._acked.setdefault(event.key, {})
            before = of_shards.get(event.shard, 0)
            of_shards[event.shard] = event.acked_bytes
            self._transfer.verified(max(0, event.acked_bytes - before))

    def refused(self, fault: Fault) -> None:
        """A call has ended with a fault."""
        self._instance.refused(fault.reason.value)

    def _end_by_fault(self, change: Changed, fault: Fault) -> None:
        if fault.reason is Reason.LEASE_EXPIRED:
            self._transfer.expired()
        if change.computed:
            self._wasted.add(change.computed, {names.ATTR_METRIC_REASON: fault.reason.value})


def _waiting_tokens(requests: Mapping[TransferKey, PrefillRecord]) -> int:
    # A list is made in one step; the loop's thread may add and remove meanwhile.
    return sum(len(r.tokens) for r in list(requests.values()) if r.state in _WAITING)
