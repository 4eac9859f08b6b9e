"""What D is: a machine that takes events and a time, and returns actions.

It holds no socket, no thread and no clock. The rules live with whom they concern: `session_desk`
and `prefill_desk` toward P, `client_desk` toward clients, `engine_desk` toward the engine,
`handoff` where the three meet, `ledger` for what all of them share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.decode import events as ev
from pd_grpc.decode.actions import Action, Drained, SessionSend
from pd_grpc.decode.checks import limits_of
from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.decode.deadlines import (
    Grace,
    OfServer,
    OfTransfer,
    Silence,
    TimerKey,
    TransferTimer,
)
from pd_grpc.decode.engine_desk import EngineDesk
from pd_grpc.decode.handoff import HandOff
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.quarantine import receiver
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.decode.sessions import Offer, Sessions
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Transfer
from pd_grpc.engine.base import Tokenizer
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason, stage_deadline
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2


@dataclass(frozen=True)
class Model:
    """What the machine must know of the engine."""

    vocab_size: int
    eos_token_ids: Collection[int]
    tokenizer: Tokenizer
    features: frozenset[str]


class DecodeMachine:
    """One decode instance."""

    def __init__(
        self,
        config: DecodeConfig,
        pool: BlockPool,
        offer: Offer,
        model: Model,
        mint: Callable[[str], str],
    ) -> None:
        """`mint(prefix)` gives an id that was never given before."""
        self.pool = pool
        self.instance = offer.instance
        limits = limits_of(
            config,
            offer.instance,
            offer.max_model_len,
            model.vocab_size,
            pool.total,
            model.features,
        )
        self.ledger = Ledger(config, pool, Sessions(offer), mint, offer.instance.epoch)
        self._handoff = HandOff(self.ledger)
        self._sessions = SessionDesk(self.ledger)
        self._prefill = PrefillDesk(self.ledger, self._handoff, limits)
        self._client = ClientDesk(
            self.ledger, self._handoff, limits, model.eos_token_ids, model.tokenizer
        )
        self._engine = EngineDesk(self.ledger, self._handoff)
        self._drained = False
        self._drain_over = False
        self._rules: Mapping[type, Callable[[Any], None]] = {
            ev.HelloReceived: self._sessions.hello,
            ev.HeartbeatReceived: self._sessions.heartbeat,
            ev.GoodbyeReceived: self._sessions.goodbye,
            ev.SessionStreamEnded: self._sessions.stream_ended,
            ev.AllocateCalled: self._prefill.allocate,
            ev.AllocateCallEnded: self._prefill.allocate_call_ended,
            ev.FirstTokenCalled: self._prefill.first_token,
            ev.ReleaseCalled: self._prefill.release,
            ev.GenerateCalled: self._client.generate,
            ev.GenerateCallEnded: self._client.call_ended,
            ev.ReceiveStarted: self._receive_started,
            ev.ReceiveProgress: self._receive_progress,
            ev.ReceiveCompleted: self._receive_completed,
            ev.ReceiveFailed: self._receive_failed,
            ev.ReceiveClosed: self._receive_closed,
            ev.WriterAttached: self._writer_attached,
            ev.WriterGone: self._writer_gone,
            ev.StepDone: self._engine.done,
            ev.StepFailed: self._engine.failed,
            ev.OperatorReleased: self._operator_released,
            ev.DrainRequested: self._drain,
            ev.Leaving: self._leave,
        }

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Take in what happened at time `now`; what is due by then happens first."""
        self.ledger.now = now
        self._fire_due()
        self._rules[type(event)](event)
        return self._settle()

    def tick(self, now: float) -> list[Action]:
        """Let time pass: fire what is due."""
        self.ledger.now = now
        self._fire_due()
        return self._settle()

    def next_wake(self) -> float | None:
        """When `tick` must be called at the latest; None when nothing waits for time."""
        times = (self.ledger.timers.next(), self.ledger.leases.next())
        return min((t for t in times if t is not None), default=None)

    def _settle(self) -> list[Action]:
        """Use what became free, start a step, and hand the actions out."""
        ledger = self.ledger
        self._engine.schedule()
        while head := ledger.reservations.head:
            too_late = ledger.serving.too_late(ledger.transfers[head], ledger.now)
            if too_late is not None:
                ledger.end(ledger.transfers[head], DecodeState.FAILED, too_late)
                continue
            grant_id = ledger.reservations.next_fitting(ledger.scheduler.holds_back)
            if grant_id is None:
                break
            transfer = ledger.transfers[grant_id]
            ledger.grant(transfer, ledger.reservations.take(grant_id))
            self._prefill.granted(transfer)
            self._client.granted(transfer)
            self._engine.schedule()
        # A step that hangs is not waited for beyond the drain's time.
        finished = not ledger.transfers and (self._engine.idle or self._drain_over)
        if ledger.draining and finished and not self._drained:
            self._drained = True
            ledger.act(Drained())
        actions, ledger.actions = ledger.actions, []
        return actions

    # Time

    def _fire_due(self) -> None:
        ledger = self.ledger
        for grant_id in ledger.leases.pop_expired(ledger.now):
            self._prefill.lease_expired(grant_id)
        for key in ledger.timers.pop_due(ledger.now):
            self._fire(key)

    def _fire(self, key: TimerKey) -> None:
        match key:
            case OfServer.STEP:
                self._engine.stuck()
            case OfServer.DRAIN:
                self._drain_is_over()
            case Silence(stream):
                self._sessions.silent(stream)
            case Grace(session_id):
                self._sessions.session_over(session_id)
            case OfTransfer(grant_id, timer):
                # Another that was due at the same time may have ended it.
                transfer = self.ledger.transfers.get(grant_id)
                if transfer is not None:
                    self._fire_for(transfer, timer)

    def _fire_for(self, transfer: Transfer, timer: TransferTimer) -> None:
        match timer:
            case TransferTimer.BUDGET:
                fault = stage_deadline(transfer.stage)
                self.ledger.end(transfer, DecodeState.FAILED, fault)
            case TransferTimer.MAX_WAIT:
                self._prefill.waited_long_enough(transfer)
            case TransferTimer.FIRST_TOKEN:
                self._handoff.no_first_token(transfer)
            case TransferTimer.ATTACH:
                self._handoff.nobody_came(transfer)

    # KV

    def _receive_started(self, event: ev.ReceiveStarted) -> None:
        transfer = self._receiving(event.grant_id)
        if transfer is not None:
            self._handoff.kv_started(transfer)

    def _receive_progress(self, event: ev.ReceiveProgress) -> None:
        transfer = self._receiving(event.grant_id)
        if transfer is not None:
            self._handoff.kv_started(transfer)
            self.ledger.leases.renew(event.grant_id, self.ledger.now)

    def _receive_completed(self, event: ev.ReceiveCompleted) -> None:
        # P has said that it writes no more, also for what has ended since, and says it only once.
        self.ledger.quarantine.completed(event.grant_id, event.shard)
        transfer = self._receiving(event.grant_id)
        if transfer is None:
            return
        self.ledger.leases.renew(event.grant_id, self.ledger.now)
        transfer.complete_shards.add(event.shard)
        if len(transfer.complete_shards) == len(self.ledger.sessions.shards):
            self._handoff.kv_completed(transfer)
        else:
            self._handoff.kv_started(transfer)

    def _receive_failed(self, event: ev.ReceiveFailed) -> None:
        transfer = self._receiving(event.grant_id)
        if transfer is not None:
            self.ledger.end(transfer, DecodeState.FAILED, event.fault)

    def _receive_closed(self, event: ev.ReceiveClosed) -> None:
        self.ledger.stopped_writing(event.grant_id, receiver(event.shard))

    def _writer_attached(self, event: ev.WriterAttached) -> None:
        self.ledger.quarantine.attached(event.owner)

    def _writer_gone(self, event: ev.WriterGone) -> None:
        self.ledger.quarantine.gone(event.owner)

    def _receiving(self, grant_id: str) -> Transfer | None:
        transfer = self.ledger.transfers.get(grant_id)
        if transfer is None or transfer.kv_complete:
            self.ledger.late()
            return None
        return transfer

    # Operators

    def _operator_released(self, event: ev.OperatorReleased) -> None:
        transfer = self.find(event.transfer_id, event.attempt)
        if transfer is None:
            self.ledger.late()
            return
        text = f"released by an operator: {event.reason or 'no reason given'}"
        self.ledger.end(transfer, DecodeState.RELEASED, Fault(Reason.RELEASED, text))

    def find(self, transfer_id: str, attempt: int) -> Transfer | None:
        """A live transfer; attempt 0 means the newest."""
        attempt = attempt or self.ledger.newest_attempt(transfer_id)
        return self.ledger.of_key(TransferKey(transfer_id, attempt))

    def _drain(self, event: ev.DrainRequested) -> None:
        ledger = self.ledger
        at = ledger.now + event.deadline_s
        earlier = ledger.timers.at(OfServer.DRAIN)
        ledger.timers.set(OfServer.DRAIN, at if earlier is None else min(at, earlier))
        if ledger.draining:
            return
        ledger.draining = True
        drain = ledger.drain()
        for session in ledger.sessions.live():
            assert session.stream is not None
            ledger.act(SessionSend(session.stream, decode_pb2.SessionResponse(drain=drain)))
        self._prefill.drain()
        self._client.drain()

    def _leave(self, event: ev.Leaving) -> None:
        self.ledger.draining = True
        self._drain_is_over()
        self._sessions.leave()
        # Nothing is granted any more, and D's memory goes with its process.
        self.ledger.quarantine.all_gone()

    def _drain_is_over(self) -> None:
        self._drain_over = True
        fault = Fault(Reason.DRAINING, "this decode instance leaves before the request has ended")
        for transfer in list(self.ledger.transfers.values()):
            self.ledger.end(transfer, DecodeState.FAILED, fault)
