"""What D holds: its transfers, their blocks, leases and timers, and how each comes to an end.

Everything here changes inside one `DecodeMachine.handle`, so a check and the act it allows are one
step; ends absorb, and what comes after them is counted and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pd_grpc.blocks.leases import Leases
from pd_grpc.blocks.pool import BlockPool, BlockState
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.decode.actions import (
    Action,
    Changed,
    CloseReceive,
    Emit,
    FinishGenerate,
    OpenReceive,
    Refuse,
    SessionSend,
)
from pd_grpc.decode.carrier import INLINE_CARRIER, Carrier
from pd_grpc.decode.checks import draining
from pd_grpc.decode.deadlines import OfServer, OfTransfer, TimerKey, TransferTimer
from pd_grpc.decode.prefix_reuse import PrefixReuse
from pd_grpc.decode.quarantine import ENGINE, PREFILL, Quarantine, receiver
from pd_grpc.decode.reservations import Reservations, Reserved
from pd_grpc.decode.scheduler import Scheduler
from pd_grpc.decode.serving import Serving
from pd_grpc.decode.sessions import Session, Sessions
from pd_grpc.decode.states import TRANSITIONS, DecodeState
from pd_grpc.decode.transfer import (
    Ended,
    Owner,
    Transfer,
    Undelivered,
    timings_of,
    usage_of,
)
from pd_grpc.engine.stopping import Finish
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.timers import Timers
from pd_grpc.protocol.tombstones import Remembered, Tombstones
from pd_grpc.v1 import decode_pb2, types_pb2


class Ledger:
    """The state that D's rules share. `now` is the time of the event being handled; `counts` are
    the transfers in each state, and of the ends all there ever were."""

    def __init__(
        self,
        config: DecodeConfig,
        pool: BlockPool,
        sessions: Sessions,
        mint: Callable[[str], str],
        decode_epoch: int,
    ) -> None:
        self.config = config
        self.pool = pool
        self.sessions = sessions
        self.mint = mint
        self.now = 0.0
        self.actions: list[Action] = []
        self.transfers: dict[str, Transfer] = {}
        self.calls: dict[int, str] = {}
        self.timers: Timers[TimerKey] = Timers()
        self.leases = Leases(config.lease_s)
        self.tombstones: Tombstones[Ended] = Tombstones(config.tombstone_s, config.tombstones)
        self.cache = PrefixCache(pool, config.prefix_cache)
        self.reuse = PrefixReuse(self.cache, config.block_size)
        self.reservations = Reservations(self.cache, config.allocate_queue)
        self.serving = Serving(config.serving_quantile)
        self.scheduler = Scheduler(self.reuse, config, self._preempted, self._resumed)
        self.in_step: frozenset[str] = frozenset()
        self.late_events = 0
        self.counts: Counter[DecodeState] = Counter()
        self.draining = False
        self.stuck: Fault | None = None
        self._decode_epoch = decode_epoch
        self._by_key: dict[TransferKey, str] = {}
        self._attempts: dict[str, int] = {}
        # As long as the tombstones that it leads to.
        self._ended_grants: Remembered[str, TransferKey] = Remembered(
            config.tombstone_s, config.tombstones
        )
        self.quarantine = Quarantine()

    def act(self, action: Action) -> None:
        """Ask the shell to do something, in order."""
        self.actions.append(action)

    def late(self) -> None:
        """Count an event that came too late or twice and changed nothing."""
        self.late_events += 1

    def closed(self) -> Fault | None:
        """Why nothing new is taken; None when it is."""
        return draining() if self.draining else self.stuck

    def drain(self) -> decode_pb2.Drain:
        """What a P is told of the drain."""
        until = self.timers.at(OfServer.DRAIN)
        return decode_pb2.Drain(deadline=duration(0.0 if until is None else until - self.now))

    def of_key(self, key: TransferKey) -> Transfer | None:
        """The live transfer of a key."""
        grant_id = self._by_key.get(key)
        return None if grant_id is None else self.transfers[grant_id]

    def of_call(self, call: int) -> Transfer | None:
        """The live transfer that a call waits on."""
        grant_id = self.calls.get(call)
        return None if grant_id is None else self.transfers.get(grant_id)

    def newest_attempt(self, transfer_id: str) -> int:
        """The greatest attempt known of a transfer, live or remembered; 0 for none."""
        live = self._attempts.get(transfer_id, 0)
        return max(live, self.tombstones.newest(transfer_id, self.now))

    def check_attempt(self, key: TransferKey) -> None:
        """Fault STALE_ATTEMPT when a newer attempt is known, live or remembered."""
        newest = self.newest_attempt(key.transfer_id)
        if key.attempt < newest:
            raise Fault(
                Reason.STALE_ATTEMPT,
                f"attempt {key.attempt} of {key.transfer_id} is older than {newest}",
                {"attempt": str(key.attempt), "newest": str(newest)},
            )

    def create(self, key: TransferKey, state: DecodeState, budget_s: float) -> Transfer:
        """A new transfer. An older attempt of it is superseded; Fault when there is a newer one."""
        self.check_attempt(key)
        older = self.of_key(TransferKey(key.transfer_id, self._attempts.get(key.transfer_id, 0)))
        if older is not None:
            attempts = {"attempt": str(older.key.attempt), "newest": str(key.attempt)}
            text = f"attempt {key.attempt} supersedes attempt {older.key.attempt}"
            self.end(older, DecodeState.FAILED, Fault(Reason.SUPERSEDED, text, attempts))
        transfer = Transfer(
            key,
            self.mint("g"),
            state,
            created=self.now,
            since=self.now,
            budget_until=self.now + budget_s,
        )
        self.transfers[transfer.grant_id] = transfer
        self._by_key[key] = transfer.grant_id
        self._attempts[key.transfer_id] = key.attempt
        self.set_budget(transfer, transfer.budget_until)
        self.counts[state] += 1
        self.act(Changed(key, None, state, None))
        return transfer

    def move(
        self,
        transfer: Transfer,
        state: DecodeState,
        fault: Fault | None = None,
        ended: Ended | None = None,
    ) -> None:
        """Move along the transition table; anything else is a defect of ours."""
        before = transfer.state
        if state not in TRANSITIONS[before]:
            raise AssertionError(f"{transfer.key}: no way from {before.name} to {state.name}")
        transfer.state = state
        transfer.since = self.now
        self.counts[before] -= 1
        self.counts[state] += 1
        self.act(Changed(transfer.key, before, state, fault, ended))

    def narrow_budget(self, transfer: Transfer, budget_s: float) -> None:
        """A request's time only shrinks."""
        self.set_budget(transfer, min(transfer.budget_until, self.now + budget_s))

    def set_budget(self, transfer: Transfer, until: float) -> None:
        """End it at `until` at the latest."""
        transfer.budget_until = until
        self.set_timer(transfer, TransferTimer.BUDGET, until)

    def set_timer(self, transfer: Transfer, timer: TransferTimer, at: float) -> None:
        """Fire one of a transfer's timers at a time, instead of when it was to fire before."""
        self.timers.set(OfTransfer(transfer.grant_id, timer), at)

    def cancel_timer(self, transfer: Transfer, timer: TransferTimer) -> None:
        """What it waited for has come."""
        self.timers.cancel(OfTransfer(transfer.grant_id, timer))

    def grant(self, transfer: Transfer, reserved: Reserved | None) -> None:
        """Give a transfer its blocks; KV may come from now on."""
        if reserved is not None:
            transfer.granted_at = self.now
            self.reuse.granted(transfer, *reserved)
        self.cancel_timer(transfer, TransferTimer.MAX_WAIT)
        self.move(transfer, DecodeState.RESERVED)
        if transfer.local:
            return
        self.leases.start(transfer.grant_id, self.now)
        if reserved is not None:
            transfer.receiving = True
            assert transfer.prefill is not None
            blocks = tuple(reserved.holding.blocks)
            owner = transfer.prefill.owner
            transfer.carrier = self._carrier(owner)
            session = self.sessions.of_owner(owner)
            senders = () if session is None else session.senders
            grant = transfer.grant_id, transfer.key, owner, blocks, self.reuse.wanted(transfer)
            carrier = transfer.carrier
            self.act(OpenReceive(*grant, carrier.transport, senders, carrier.kv_format))

    def end(
        self,
        transfer: Transfer,
        state: DecodeState,
        fault: Fault | None = None,
        *,
        finish: Finish | None = None,
        tell_prefill: bool = True,
        undelivered: Undelivered | None = None,
    ) -> None:
        """Bring a transfer to its end: both legs hear of it, its blocks go back, and a tombstone
        stays. `fault` is None only for a complete answer or a plain release."""
        self.serving.learn(transfer, state, fault, self.now)
        epitaph = self._epitaph(transfer, state, fault, undelivered)
        self.move(transfer, state, fault, epitaph)
        asking = transfer.prefill is not None and transfer.prefill.calls
        if tell_prefill and not transfer.handed_off and not asking:
            self._tell_prefill(transfer, fault)
        self._answer_allocates(transfer, fault)
        self._end_client(transfer, fault, finish)
        self._give_back(transfer, fault)
        self._forget(transfer)
        self.tombstones.add(transfer.key, epitaph, self.now)
        self._ended_grants.add(transfer.grant_id, transfer.key, self.now)

    def drop(self, transfer: Transfer, fault: Fault | None) -> None:
        """End a transfer that never held anything, without a tombstone, so that it may be asked for
        again; a client that waits is told the fault."""
        state = DecodeState.RELEASED if transfer.client is None else DecodeState.FAILED
        epitaph = self._epitaph(transfer, state, fault, None)
        self.move(transfer, state, fault, epitaph)
        self._end_client(transfer, fault, None)
        self._give_back(transfer, fault)
        self._forget(transfer)

    def tell_again(self, grant_id: str, session: Session) -> None:
        """P holds a grant whose transfer has ended: the word of that did not reach it. Nothing is
        said of a grant that is not remembered, or was another's."""
        key = self._ended_grants.get(grant_id, self.now)
        ended = None if key is None else self.tombstones.get(key, self.now)
        if key is not None and ended is not None and ended.peer == session.owner.name:
            self._tell(session, key, ended.state, ended.fault)

    def emit(self, transfer: Transfer) -> None:
        """Show the client what is held for it."""
        if transfer.client is not None and transfer.held:
            self.act(Emit(transfer.client.call, tuple(transfer.held)))
            transfer.held.clear()

    def stopped_writing(self, grant_id: str, writer: str) -> None:
        """`writer` will not touch the blocks of a grant any more: free them after the last one."""
        self.quarantine.stopped(grant_id, writer)

    def _carrier(self, owner: Owner) -> Carrier:
        """How the KV of a grant is to come: as the session says, but a P writes itself only where
        it is known that it can, for whoever else has the memory could not be watched."""
        session = self.sessions.of_owner(owner)
        if session is None or (
            session.carrier.one_sided and not self.quarantine.is_attached(owner)
        ):
            return INLINE_CARRIER
        return session.carrier

    def _preempted(self, transfer: Transfer) -> None:
        self.move(transfer, DecodeState.PREEMPTED)

    def _resumed(self, transfer: Transfer) -> None:
        self.move(transfer, DecodeState.DECODING)

    def _tell_prefill(self, transfer: Transfer, fault: Fault | None) -> None:
        owner = transfer.owner
        session = None if owner is None else self.sessions.of_owner(owner)
        if session is not None:
            self._tell(session, transfer.key, transfer.state, fault)

    def _tell(
        self, session: Session, key: TransferKey, state: DecodeState, fault: Fault | None
    ) -> None:
        if session.stream is None:
            return
        ended = decode_pb2.TransferEnded(
            ref=self.ref(key),
            status=None if fault is None else fault.status(),
            state=state.wire,
        )
        self.act(SessionSend(session.stream, decode_pb2.SessionResponse(transfer_ended=ended)))

    def ref(self, key: TransferKey) -> types_pb2.TransferRef:
        """A key as it goes on the wire."""
        return key.ref(self._decode_epoch)

    def _answer_allocates(self, transfer: Transfer, fault: Fault | None) -> None:
        leg = transfer.prefill
        if leg is None:
            return
        answer = fault or Fault(Reason.RELEASED, f"{transfer.key} was released")
        for call in leg.calls:
            self.calls.pop(call, None)
            self.act(Refuse(call, answer))
        leg.calls.clear()

    def _end_client(self, transfer: Transfer, fault: Fault | None, finish: Finish | None) -> None:
        client = transfer.client
        if client is None:
            return
        self.emit(transfer)
        self.calls.pop(client.call, None)
        if finish is not None:
            usage = usage_of(client.prompt, client.stop.generated, transfer.spared_tokens)
            self.act(FinishGenerate(client.call, finish, usage, timings_of(transfer)))
            return
        cause = fault or Fault(Reason.RELEASED, f"{transfer.key} was released by the prefill")
        self.act(Refuse(client.call, cause.for_client()))

    def _give_back(self, transfer: Transfer, fault: Fault | None) -> None:
        self.reservations.leave(transfer.grant_id)
        self.scheduler.drop(transfer)
        if transfer.receiving:
            why = fault or Fault(Reason.RELEASED, f"{transfer.key} needs no more KV")
            self.act(CloseReceive(transfer.grant_id, why))
        holding, transfer.holding = transfer.holding, None
        if holding is None:
            return
        writers: set[str] = set()
        owner = transfer.owner
        if transfer.written_to:
            writers.update(receiver(shard) for shard in range(len(self.sessions.shards)))
            writes = transfer.carrier.one_sided and owner is not None
            if writes and owner is not None and self.quarantine.is_attached(owner):
                writers.add(PREFILL)
        if transfer.grant_id in self.in_step:
            writers.add(ENGINE)
        # Nobody writes to what others may find.
        kept = transfer.kept_blocks
        incomplete = set(range(len(self.sessions.shards))) - transfer.complete_shards
        self.quarantine.take(
            transfer.grant_id, transfer.key, holding, owner, writers, kept, incomplete
        )

    def _forget(self, transfer: Transfer) -> None:
        grant_id = transfer.grant_id
        self.leases.end(grant_id)
        for timer in TransferTimer:
            self.cancel_timer(transfer, timer)
        del self.transfers[grant_id]
        del self._by_key[transfer.key]
        if self._attempts.get(transfer.key.transfer_id) == transfer.key.attempt:
            del self._attempts[transfer.key.transfer_id]

    def _epitaph(
        self,
        transfer: Transfer,
        state: DecodeState,
        fault: Fault | None,
        undelivered: Undelivered | None,
    ) -> Ended:
        client, leg = transfer.client, transfer.prefill
        prompt = 0 if leg is None else leg.request.prompt_tokens
        return Ended(
            state,
            fault,
            transfer.request_id,
            transfer.created,
            self.now,
            "" if leg is None else leg.owner.name,
            len(client.prompt) if client is not None else prompt,
            client.stop.generated if client is not None else len(transfer.output),
            undelivered,
        )


def hold_as(transfer: Transfer, state: BlockState) -> None:
    """Count a transfer's blocks in another class."""
    if transfer.holding is not None and transfer.holding.state is not state:
        transfer.holding.move(state)
