"""The ledger of P's requests: who is in flight, who has ended, what is to be done next."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pd_grpc.blocks.pool import BlockState
from pd_grpc.prefill.actions import Action, Changed, Emit
from pd_grpc.prefill.states import TRANSITIONS, PrefillRecord, PrefillState
from pd_grpc.prefill.view import describe
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.timers import Timers
from pd_grpc.protocol.tombstones import Tombstones
from pd_grpc.v1 import admin_pb2, prefill_pb2


class Timer(NamedTuple):
    """What fires: `kind` for one request, one of its strands, or the machine itself."""

    kind: str
    key: TransferKey | None = None
    strand: int = 0


class Requests:
    """Shared by the machine's parts, each of which appends to `outbox` what must be done."""

    def __init__(self, config: PrefillConfig) -> None:
        self.outbox: list[Action] = []
        self.timers: Timers[Timer] = Timers()
        self.in_flight: dict[TransferKey, PrefillRecord] = {}
        """In order of arrival."""
        self.late_events = 0
        self.ended_by_state: Counter[PrefillState] = Counter()
        self._by_call: dict[int, PrefillRecord] = {}
        self._attempts: dict[str, int] = {}
        self._lingering: dict[TransferKey, PrefillRecord] = {}
        """Ended, but the engine or the bulk side may still touch their blocks."""
        self._tombstones: Tombstones[admin_pb2.TransferInfo] = Tombstones(
            config.tombstone_s, config.tombstones
        )

    def of_call(self, call: int) -> PrefillRecord | None:
        """The request in flight of a Prefill call."""
        return self._by_call.get(call)

    def get(self, key: TransferKey) -> PrefillRecord | None:
        """A request in flight, or one that has ended while its blocks are in use."""
        return self.in_flight.get(key) or self._lingering.get(key)

    def newest(self, transfer_id: str, now: float) -> int:
        """The greatest attempt that P knows of or remembers; 0 for none."""
        flying = self._attempts.get(transfer_id, 0)
        return max(flying, self._tombstones.newest(transfer_id, now))

    def tombstone(self, key: TransferKey, now: float) -> admin_pb2.TransferInfo | None:
        """What a request that has ended was, while it is remembered."""
        return self._tombstones.get(key, now)

    def add(self, record: PrefillRecord, now: float) -> None:
        """A request is taken in."""
        record.state_since = now
        self.in_flight[record.key] = record
        self._by_call[record.call] = record
        self._attempts[record.key.transfer_id] = record.key.attempt
        self.timers.set(Timer("budget", record.key), record.deadline)
        self.do(Changed(record.key, record.call, None, record.state))

    def do(self, *actions: Action) -> None:
        """Ask the shells for something."""
        self.outbox.extend(actions)

    def emit(self, record: PrefillRecord, response: prefill_pb2.PrefillResponse) -> None:
        """Tell the caller something."""
        self.do(Emit(record.call, response))

    def move(self, record: PrefillRecord, state: PrefillState, now: float) -> None:
        """Change a request's state, by the table alone."""
        if state not in TRANSITIONS[record.state]:
            raise AssertionError(f"{record.key} cannot go from {record.state.name} to {state.name}")
        before, record.state = record.state, state
        record.state_since = now
        computed = record.computed - record.cached_tokens
        self.do(Changed(record.key, record.call, before, state, record.fault, computed))

    def end(
        self, record: PrefillRecord, state: PrefillState, fault: Fault | None, now: float
    ) -> None:
        """Move a request to its end and forget it but for a tombstone."""
        record.fault = fault
        record.times.ended = now
        self.move(record, state, now)
        self.ended_by_state[state] += 1
        for timer in _timers_of(record):
            self.timers.cancel(timer)
        del self.in_flight[record.key]
        del self._attempts[record.key.transfer_id]
        self._by_call.pop(record.call, None)
        self._lingering[record.key] = record
        self.return_blocks(record)
        self._tombstones.add(record.key, describe(record, now), now)

    def return_blocks(self, record: PrefillRecord) -> None:
        """Give back what an ended request holds, or as soon as nobody touches it."""
        if record.state.terminal and record.holding is not None:
            if record.blocks_in_use:
                if record.holding.state is not BlockState.QUARANTINED:
                    record.holding.quarantine()
                return
            record.holding.release()
            record.holding = None
        if record.state.terminal and not record.blocks_in_use:
            self._lingering.pop(record.key, None)

    def next_timer(self, record: PrefillRecord) -> tuple[str, float] | None:
        """The first timer of a request: its name, and when it fires."""
        timers = _timers_of(record)
        found = [(at, timer.kind) for timer in timers if (at := self.timers.at(timer)) is not None]
        return (min(found)[1], min(found)[0]) if found else None


def _timers_of(record: PrefillRecord) -> list[Timer]:
    timers = [Timer(kind, record.key) for kind in ("budget", "first_token")]
    of_strands = [(kind, strand) for kind in ("kv", "reopen") for strand in record.streams]
    return timers + [Timer(kind, record.key, strand) for kind, strand in of_strands]
