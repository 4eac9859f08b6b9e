"""D in numbers."""

from __future__ import annotations

from collections.abc import Mapping

from pd_grpc.decode import events as ev
from pd_grpc.decode.actions import Changed
from pd_grpc.decode.carrier import INLINE_CARRIER
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.states import STAGES, TRANSITIONS, DecodeState
from pd_grpc.decode.transfer import Transfer
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.messages import transport_label
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry.instance_metrics import MachineMetrics, stages_ahead
from pd_grpc.telemetry.instruments import Instruments

INLINE = transport_label(INLINE_CARRIER.transport)
_AHEAD = stages_ahead(STAGES, TRANSITIONS)


class DecodeMetrics(MachineMetrics[TransferKey]):
    """Hears of every change of state, every event and every refusal."""

    def __init__(self, instruments: Instruments, machine: DecodeMachine, clock: Clock) -> None:
        super().__init__(instruments, "decode", Reason, clock.now)
        ledger = self._ledger = machine.ledger
        self.watch_late_events(lambda: ledger.late_events)
        self.watch_pool(machine.pool.counts)
        cache, size = ledger.cache, ledger.config.block_size
        self.watch_prefix_cache(
            lambda: cache.asked_blocks * size, lambda: cache.found_blocks * size
        )
        self.watch_queue(lambda: _waiting_tokens(ledger.transfers))

    def changed(self, change: Changed) -> None:
        """A transfer has entered another state."""
        left = None if change.before is None else STAGES[change.before]
        self.moved(change.key, left, _AHEAD[change.after], change.fault)
        if change.after is DecodeState.RECEIVING:
            transfer = self._ledger.of_key(change.key)
            self.transfer_begins(change.key, INLINE if transfer is None else _label(transfer))
        elif change.before is DecodeState.RECEIVING:
            self.transfer_ends(change.key, change.fault)
        if change.after is DecodeState.EXPIRED:
            self.lease_expired()

    def heard(self, event: ev.Event, at: float) -> None:
        """KV has come."""
        if isinstance(event, ev.ReceiveProgress):
            transfer = self._ledger.transfers.get(event.grant_id)
            how = INLINE if transfer is None else _label(transfer)
            self.verified(event.payload_bytes, how)


def _label(transfer: Transfer) -> str:
    return transport_label(transfer.carrier.transport)


def _waiting_tokens(transfers: Mapping[str, Transfer]) -> int:
    # A list is made in one step; the loop's thread may add and remove meanwhile.
    waiting = (t.prefill for t in list(transfers.values()) if t.state is DecodeState.WAITING)
    return sum(leg.request.prompt_tokens for leg in waiting if leg is not None)
