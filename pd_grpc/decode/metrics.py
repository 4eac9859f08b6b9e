"""D in numbers."""

from __future__ import annotations

from collections.abc import Mapping

from pd_grpc.decode import events as ev
from pd_grpc.decode.actions import Changed
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.states import STAGES, DecodeState
from pd_grpc.decode.transfer import Transfer
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry.instance_metrics import OK, InstanceMetrics, TransferMetrics
from pd_grpc.telemetry.instruments import Instruments


class DecodeMetrics:
    """Hears of every change of state, every event and every refusal."""

    def __init__(self, instruments: Instruments, machine: DecodeMachine, clock: Clock) -> None:
        self._clock = clock
        self._instance = InstanceMetrics(instruments, "decode")
        self._transfer = TransferMetrics(instruments, "decode")
        self._since: dict[TransferKey, float] = {}
        self._receiving: dict[TransferKey, float] = {}
        ledger = machine.ledger
        self._instance.watch(
            late_events=lambda: ledger.late_events,
            blocks=lambda: {
                state.name.lower(): number for state, number in machine.pool.counts().items()
            },
            queued_tokens=lambda: _waiting_tokens(ledger.transfers),
        )

    def changed(self, change: Changed) -> None:
        """A transfer has entered another state."""
        now = self._clock.now()
        since = self._since.pop(change.key, now)
        outcome = OK if change.fault is None else change.fault.reason.value
        if change.before is not None:
            self._instance.stage(STAGES[change.before], now - since, outcome)
        if change.after is DecodeState.RECEIVING:
            self._receiving[change.key] = now
        elif change.before is DecodeState.RECEIVING:
            self._transfer.ended(now - self._receiving.pop(change.key), outcome)
        if change.after is DecodeState.EXPIRED:
            self._transfer.expired()
        if not change.after.terminal:
            self._since[change.key] = now

    def heard(self, event: ev.Event, at: float) -> None:
        """KV has come."""
        if isinstance(event, ev.ReceiveProgress):
            self._transfer.verified(event.payload_bytes)

    def refused(self, fault: Fault) -> None:
        """A call has ended with a fault."""
        self._instance.refused(fault.reason.value)


def _waiting_tokens(transfers: Mapping[str, Transfer]) -> int:
    # A list is made in one step; the loop's thread may add and remove meanwhile.
    waiting = (t.prefill for t in list(transfers.values()) if t.state is DecodeState.WAITING)
    return sum(leg.request.prompt_tokens for leg in waiting if leg is not None)
