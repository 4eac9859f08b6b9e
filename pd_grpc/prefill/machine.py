"""P as a machine: events and a time in, actions out. No socket, no thread, no clock, no torch."""

from __future__ import annotations

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.engine.base import Sampled, Tokenizer
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import Action, Drained, FailCall, FinishCall
from pd_grpc.prefill.carriers import INLINE_ALONE, Carriers
from pd_grpc.prefill.compute import Compute
from pd_grpc.prefill.handover import Handover
from pd_grpc.prefill.placement import Placement
from pd_grpc.prefill.requests import Requests, Timer
from pd_grpc.prefill.sender_watch import SENDER
from pd_grpc.prefill.states import PrefillRecord, PrefillState, Times
from pd_grpc.prefill.validation import ModelLimits, check_prefill, tokens_of
from pd_grpc.prefill.view import describe, handed_off, stage_of
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason, stage_deadline
from pd_grpc.protocol.refs import TransferKey, key_of
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import admin_pb2, prefill_pb2, types_pb2

_DRAIN = Timer("drain")


class PrefillMachine:
    """All of P's requests, from the call to the hand-off.

    A request passes from part to part: `placement` finds a D that grants blocks, `compute` takes it
    through the engine, `handover` sees its KV and first token to D. Whatever goes wrong in any of
    them ends it here, once.
    """

    def __init__(
        self,
        config: PrefillConfig,
        instance: types_pb2.Instance,
        limits: ModelLimits,
        pool: BlockPool,
        tokenizer: Tokenizer,
        carriers: Carriers = INLINE_ALONE,
    ) -> None:
        self.instance = instance
        self.pool = pool
        self.cache = PrefixCache(pool, config.prefix_cache)
        self.requests = Requests(config)
        self.draining = False
        self._drained = False
        self._drain_over = False
        self._config = config
        self._limits = limits
        self.placement = Placement(
            self.requests,
            config,
            instance,
            limits,
            fail=self._fail,
            granted=lambda record: self.compute.ready(record),
            session_up=lambda record, now: self.handover.session_up(record, now),
            carriers=carriers,
        )
        self.conversations = self.placement.conversations
        self.handover = Handover(
            self.requests,
            config,
            limits,
            tokenizer,
            self.conversations,
            fail=self._fail,
            handed_off=self._hand_off,
        )
        self.compute = Compute(
            self.requests,
            config,
            self.cache,
            limits.layout,
            fail=self._fail,
            decoding_s=self.placement.decoding_s,
            starting=self.handover.starting,
            computed=self._computed,
        )

    # --- what the shells call ------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Let something happen, and return what must be done about it."""
        if isinstance(event, ev.OfBulk):
            self.handover.watch.heard()
        self._dispatch(event, now)
        return self._settle(now)

    def tick(self, now: float) -> list[Action]:
        """Do what is due."""
        for timer in self.requests.timers.pop_due(now):
            self._fire(timer, now)
        self.conversations.tick(now)
        self.placement.tick(now)
        return self._settle(now)

    def next_wake(self) -> float | None:
        """When `tick` must be called next."""
        parts = (self.conversations, self.placement)
        wakes = [self.requests.timers.next(), *(part.next_wake() for part in parts)]
        return min((at for at in wakes if at is not None), default=None)

    def leave(self, now: float) -> list[Action]:
        """Say goodbye to every D; for a server that stops."""
        self.placement.releases.clear(now)
        self.conversations.leave("prefill instance stops", now)
        return self._settle(now)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._limits.layout.block_size

    @property
    def paused(self) -> bool:
        """Whether nothing new is asked for or computed."""
        return self.compute.paused

    @property
    def stuck(self) -> Fault | None:
        """Why nothing can be taken: the engine or the KV sender makes no progress."""
        return self.compute.stuck or self.handover.watch.stuck

    def transfers(self, now: float) -> list[admin_pb2.TransferInfo]:
        """What is in flight, oldest first."""
        flying = self.requests.in_flight.values()
        return [describe(record, now, self.requests.next_timer(record)) for record in flying]

    def transfer(self, transfer_id: str, attempt: int, now: float) -> admin_pb2.TransferInfo | None:
        """One transfer, ended ones while they are remembered; attempt 0 is the newest."""
        key = TransferKey(transfer_id, attempt or self.requests.newest(transfer_id, now))
        record = self.requests.in_flight.get(key)
        if record is not None:
            return describe(record, now, self.requests.next_timer(record))
        return self.requests.tombstone(key, now)

    # --- events --------------------------------------------------------------------------------

    def _dispatch(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.PrefillCalled):
            self._called(event, now)
        elif isinstance(event, ev.PrefillCallEnded):
            self._call_ended(event.call, now)
        elif isinstance(event, ev.SessionMessage):
            self.conversations.message(event, now)
        elif isinstance(event, ev.SessionBroken):
            self.conversations.broken(event, now)
        elif isinstance(event, ev.TransportFailed):
            self.conversations.transport_failed(event, now)
        elif isinstance(event, ev.AllocateAnswered):
            self.placement.answered(event, now)
        elif isinstance(event, ev.StepDone):
            self.compute.done(event.step, event.results, now)
        elif isinstance(event, ev.StepFailed):
            self.compute.failed(event.step, event.message, now)
        elif isinstance(event, ev.KvAcked):
            self.handover.acked(event, now)
        elif isinstance(event, ev.TransferReopened):
            self.handover.silence.reached(event.key, event.strand)
        elif isinstance(event, ev.TransferCompleted):
            ended = self.requests.get(event.key)
            self.handover.completed(event.key, event.strand, now)
            if ended is not None:
                self.placement.writing.over(ended, now)
        elif isinstance(event, ev.TransferBroken):
            self.handover.broken(event, now)
        elif isinstance(event, ev.TransferClosed):
            ended = self.requests.get(event.key)
            self.handover.closed(event)
            if ended is not None:
                self.placement.writing.over(ended, now)
        elif isinstance(event, ev.FirstTokenAnswered):
            self._first_token_answered(event, now)
        elif isinstance(event, ev.ReleaseAnswered):
            self.placement.call_failed(event.sent.endpoint, event.fault, "release", now)
            self.placement.releases.answered(event, now)
        elif isinstance(event, ev.OperatorRelease):
            self._operator_release(event, now)
        elif isinstance(event, ev.PauseRequested):
            self.placement.pool.paused = self.compute.paused = event.paused
        else:
            self._drain(event.deadline_s, now)

    def _fire(self, timer: Timer, now: float) -> None:
        if timer.key is None:
            if timer == _DRAIN:
                self._end_drain(now)
            elif timer == SENDER:
                self.handover.watch.stick(now)
            else:
                self.compute.stick(now)
        elif timer.kind == "budget":
            record = self.requests.in_flight.get(timer.key)
            if record is not None:
                self._fail(record, stage_deadline(stage_of(record)), now, True)
        elif timer.kind == "kv":
            self.handover.silence.too_long(timer.key, timer.strand, now)
        elif timer.kind == "first_token":
            self.handover.resend_first_token(timer.key, now)
        else:
            self.handover.reopen(timer.key, timer.strand, now)

    def _settle(self, now: float) -> list[Action]:
        """Let whoever can go on do so, and hand out what has come together."""
        if self.conversations.superseded is not None and not self.draining:
            self._drain(self._config.drain_s, now)
        while self.placement.pump(now) or self.compute.pump(now):
            pass
        self.handover.watch.look(now)
        told = self._drain_over or not self.placement.releases.reconnecting()
        if self.draining and not self._drained and told and not self.requests.in_flight:
            self._drained = True
            self.requests.timers.cancel(_DRAIN)
            self.requests.do(Drained())
        actions, self.requests.outbox = self.requests.outbox, []
        return actions

    # --- a request comes -----------------------------------------------------------------------

    def _called(self, event: ev.PrefillCalled, now: float) -> None:
        tokens = tokens_of(event.request)
        try:
            sampling = check_prefill(event.request, tokens, self.instance.name, self._limits)
            if event.objection is not None:
                raise event.objection
            self._admit(event.request, now)
        except Fault as fault:
            self.requests.do(FailCall(event.call, fault))
            return
        chain = BlockChain(self.block_size, event.request.scope.cache_salt)
        record = _record(event, tokens, chain, sampling, now)
        self.requests.add(record, now)
        endpoint = record.target.endpoint
        queued = prefill_pb2.Queued(ahead=self.placement.pool.waiting_for(endpoint))
        self.requests.emit(record, prefill_pb2.PrefillResponse(queued=queued))
        full = self.placement.full(endpoint)
        if full is None:
            self.placement.place(record, now)
        else:
            self.placement.turn_away(record, full, now)

    def _admit(self, request: prefill_pb2.PrefillRequest, now: float) -> None:
        """Fault when a well-formed request cannot be taken now. A newer attempt ends an older."""
        if self.draining:
            raise Fault(Reason.DRAINING, f"prefill instance {self.instance.name} is draining")
        if self.stuck is not None:
            raise self.stuck
        key = key_of(request.ref)
        newest = self.requests.newest(key.transfer_id, now)
        if key.attempt < newest:
            raise Fault(
                Reason.STALE_ATTEMPT,
                f"attempt {key.attempt} of {key.transfer_id} came after attempt {newest}",
                {"attempt": str(key.attempt), "newest": str(newest)},
            )
        if key in self.requests.in_flight:
            raise Fault(Reason.DUPLICATE_TRANSFER, f"{key} is in flight here")
        if self.requests.tombstone(key, now) is not None or self.requests.get(key) is not None:
            raise Fault(Reason.RELEASED, f"{key} has ended here; a new attempt has a new number")
        older = self.requests.in_flight.get(TransferKey(key.transfer_id, newest))
        if older is not None:
            self._supersede(older, key, now)
        full = [self.placement.full(decode.endpoint) for decode in request.decodes]
        if full[0] is not None and None not in full:
            raise full[0]

    def _supersede(self, older: PrefillRecord, newer: TransferKey, now: float) -> None:
        fault = Fault(
            Reason.SUPERSEDED,
            f"attempt {newer.attempt} of {newer.transfer_id} took the place of "
            f"attempt {older.key.attempt}",
            {"attempt": str(older.key.attempt), "newest": str(newer.attempt)},
        )
        self._fail(older, fault, now, True)

    # --- a request ends ------------------------------------------------------------------------

    def _first_token_answered(self, event: ev.FirstTokenAnswered, now: float) -> None:
        record = self.requests.in_flight.get(event.key)
        if record is not None:
            self.placement.call_failed(record.target.endpoint, event.fault, "first_token", now)
        self.handover.first_token_answered(event, now)

    def _computed(self, record: PrefillRecord, sampled: Sampled, now: float) -> None:
        self.placement.computed(record)
        self.handover.computed(record, sampled, now)

    def _hand_off(self, record: PrefillRecord, now: float) -> None:
        """D owns it now: no lease, session or Release of ours touches it any more."""
        message = prefill_pb2.PrefillResponse(handed_off=handed_off(record))
        self.requests.emit(record, message)
        self._end(record, PrefillState.HANDED_OFF, None, False, now)
        self.requests.do(FinishCall(record.call))

    def _fail(self, record: PrefillRecord, fault: Fault, now: float, tell: bool) -> None:
        """End a request by a fault; `tell` says whether D must hear of it."""
        if record.state.terminal:
            self.requests.late_events += 1
            return
        self._end(record, PrefillState.FAILED, fault, tell, now)
        self.requests.do(FailCall(record.call, fault))

    def _call_ended(self, call: int, now: float) -> None:
        record = self.requests.of_call(call)
        if record is not None:
            fault = Fault(Reason.CLIENT_GONE, "the caller of Prefill left before the hand-off")
            self._end(record, PrefillState.CANCELLED, fault, True, now)

    def _end(
        self,
        record: PrefillRecord,
        state: PrefillState,
        fault: Fault | None,
        tell: bool,
        now: float,
    ) -> None:
        self.handover.forget(record)
        self.placement.forget(record, fault if tell else None, now)
        self.compute.forget(record)
        self.compute.learn(record, state, fault, now)
        self.requests.end(record, state, fault, now)
        self.placement.writing.over(record, now)

    # --- the operator --------------------------------------------------------------------------

    def _operator_release(self, event: ev.OperatorRelease, now: float) -> None:
        attempt = event.attempt or self.requests.newest(event.transfer_id, now)
        record = self.requests.in_flight.get(TransferKey(event.transfer_id, attempt))
        if record is None:
            self.requests.late_events += 1
            return
        said = f": {event.reason}" if event.reason else ""
        self._fail(record, Fault(Reason.RELEASED, f"released by an operator{said}"), now, True)

    def _drain(self, deadline_s: float, now: float) -> None:
        self.draining = True
        if deadline_s <= 0:
            self._end_drain(now)
        elif not self._drained:
            # Of several deadlines the earliest stands.
            earlier = self.requests.timers.at(_DRAIN)
            at = now + deadline_s
            self.requests.timers.set(_DRAIN, at if earlier is None else min(at, earlier))

    def _end_drain(self, now: float) -> None:
        self._drain_over = True
        name = self.instance.name
        fault = Fault(Reason.DRAINING, f"prefill instance {name} did not finish it while draining")
        for record in list(self.requests.in_flight.values()):
            self._fail(record, fault, now, True)


def _record(
    event: ev.PrefillCalled,
    tokens: tuple[int, ...],
    chain: BlockChain,
    sampling: Sampling,
    now: float,
) -> PrefillRecord:
    request = event.request
    return PrefillRecord(
        key=key_of(request.ref),
        call=event.call,
        request=request,
        sampling=sampling,
        tokens=tokens,
        chain=chain,
        deadline=now + max(0.0, event.budget_s),
        times=Times(now),
    )
