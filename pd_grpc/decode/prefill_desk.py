"""D's rules toward P about one transfer: Allocate, the first token, Release."""

from __future__ import annotations

from collections.abc import Iterable

from pd_grpc.decode.actions import Answer, Refuse
from pd_grpc.decode.checks import (
    Limits,
    check_allocate,
    check_ref,
    draining,
    first_logprobs_errors,
    legs_differ,
)
from pd_grpc.decode.deadlines import TransferTimer
from pd_grpc.decode.events import (
    AllocateCalled,
    AllocateCallEnded,
    FirstTokenCalled,
    ReleaseCalled,
)
from pd_grpc.decode.handoff import HandOff
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.reservations import no_blocks
from pd_grpc.decode.sessions import Session
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import PrefillLeg, Transfer
from pd_grpc.protocol.faults import (
    Fault,
    Reason,
    TransportFault,
    bad_request,
    read_status,
    stage_deadline,
)
from pd_grpc.protocol.messages import duration, plain_transport, seconds
from pd_grpc.protocol.refs import key_of
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import decode_pb2, types_pb2


class PrefillDesk:
    """Answers P."""

    def __init__(
        self,
        ledger: Ledger,
        handoff: HandOff,
        limits: Limits,
    ) -> None:
        self._ledger = ledger
        self._handoff = handoff
        self._limits = limits

    # Allocate

    def allocate(self, event: AllocateCalled) -> None:
        """Grant, join, queue or refuse."""
        try:
            if event.objection is not None:
                raise event.objection
            self._allocate(event.call, event.request)
        except Fault as fault:
            self._ledger.act(Refuse(event.call, fault))

    def allocate_call_ended(self, event: AllocateCallEnded) -> None:
        """The queue is left when the last caller has gone."""
        ledger = self._ledger
        transfer = ledger.of_call(event.call)
        ledger.calls.pop(event.call, None)
        if transfer is None or transfer.prefill is None:
            return
        del transfer.prefill.calls[event.call]
        if not transfer.prefill.calls and transfer.state is DecodeState.WAITING:
            self._leave_queue(transfer, None)

    def waited_long_enough(self, transfer: Transfer) -> None:
        """max_wait of one or more calls is over: refuse them, and tell when to try again."""
        leg = transfer.prefill
        assert leg is not None
        over = [call for call, until in leg.calls.items() if until <= self._ledger.now]
        self._refuse_waiting(transfer, over, self._no_blocks(leg))

    def drain(self) -> None:
        """Those that wait for blocks do better elsewhere."""
        for transfer in list(self._ledger.transfers.values()):
            if transfer.prefill is not None and transfer.state is DecodeState.WAITING:
                self._refuse_waiting(transfer, list(transfer.prefill.calls), draining())

    def _refuse_waiting(self, transfer: Transfer, calls: Iterable[int], fault: Fault) -> None:
        leg = transfer.prefill
        assert leg is not None
        for call in calls:
            del leg.calls[call]
            self._ledger.calls.pop(call, None)
            self._ledger.act(Refuse(call, fault))
        if leg.calls:
            self._await_blocks(transfer, leg)
        else:
            self._leave_queue(transfer, fault)

    def _await_blocks(self, transfer: Transfer, leg: PrefillLeg) -> None:
        """Until the first of its calls has waited long enough."""
        until = min(leg.calls.values())
        self._ledger.set_timer(transfer, TransferTimer.MAX_WAIT, until)

    def _no_blocks(self, leg: PrefillLeg) -> Fault:
        needed = self._limits.blocks_for(leg.request.prompt_tokens + 1)
        return no_blocks(needed, self._ledger.pool.free)

    def granted(self, transfer: Transfer) -> None:
        """Answer everyone who waits for this grant."""
        leg = transfer.prefill
        if leg is None:
            return
        leg.response = self._cache_info(transfer)
        for call in leg.calls:
            self._ledger.calls.pop(call, None)
            self._ledger.act(Answer(call, leg.response))
        leg.calls.clear()

    def lease_expired(self, grant_id: str) -> None:
        """Nobody renewed a grant."""
        transfer = self._ledger.transfers[grant_id]
        text = f"the lease of {transfer.key} ended in {transfer.state.name}"
        self._ledger.end(transfer, DecodeState.EXPIRED, Fault(Reason.LEASE_EXPIRED, text))

    def _allocate(self, call: int, request: decode_pb2.AllocateRequest) -> None:
        ledger = self._ledger
        session = ledger.sessions.of_call(request.session_id)
        check_ref(request.ref, self._limits.instance, any_epoch=False)
        check_allocate(request, self._limits, session.features)
        key = key_of(request.ref)
        if ledger.tombstones.get(key, ledger.now) is not None:
            raise Fault(Reason.RELEASED, f"{key} has ended")
        transfer = ledger.of_key(key)
        body = body_of(request)
        if transfer is not None:
            self._owned(transfer, session)
        leg = None if transfer is None else transfer.prefill
        if leg is not None and leg.body != body:
            text = f"{key} is in flight with another request body"
            raise Fault(Reason.DUPLICATE_TRANSFER, text)
        closed = ledger.closed()
        if leg is None and closed is not None:
            raise closed
        budget = self._budget(request)
        if transfer is not None and leg is not None and leg.response is not None:
            if not transfer.handed_off:
                ledger.narrow_budget(transfer, budget)
            ledger.act(Answer(call, leg.response))
            return
        if transfer is None:
            transfer = ledger.create(key, DecodeState.EXPECTED, budget)
        else:
            ledger.narrow_budget(transfer, budget)
        if transfer.prefill is None:
            transfer.prefill = PrefillLeg(session.owner, request, body)
            transfer.request_id = transfer.request_id or request.request_id
            differ = legs_differ(transfer)
            if differ is not None:
                ledger.end(transfer, DecodeState.FAILED, differ, tell_prefill=False)
                raise differ
        self._wait_or_grant(transfer, call, seconds(request.max_wait))

    def _budget(self, request: decode_pb2.AllocateRequest) -> float:
        """What is left of the request's time, in seconds. Fault when it is over."""
        if not request.HasField("budget"):
            return self._ledger.config.request_budget_s
        budget = seconds(request.budget)
        if budget <= 0:
            raise stage_deadline("allocate")
        return budget

    def _wait_or_grant(self, transfer: Transfer, call: int, max_wait_s: float) -> None:
        ledger, leg = self._ledger, transfer.prefill
        assert leg is not None
        if transfer.state is DecodeState.EXPECTED and not self._enter_queue(transfer, max_wait_s):
            leg.response = self._cache_info(transfer)
            ledger.act(Answer(call, leg.response))
            return
        if max_wait_s <= 0:
            raise self._no_blocks(leg)
        leg.calls[call] = ledger.now + max_wait_s
        ledger.calls[call] = transfer.grant_id
        self._await_blocks(transfer, leg)

    def _enter_queue(self, transfer: Transfer, max_wait_s: float) -> bool:
        """True when it waits, False when it was granted at once."""
        ledger, leg = self._ledger, transfer.prefill
        assert leg is not None
        if not leg.request.kv_needed:
            ledger.grant(transfer, None)
            return False
        needed = self._limits.blocks_for(leg.request.prompt_tokens + 1)
        names = [each.hash for each in leg.request.block_hashes]
        try:
            reserved = ledger.reservations.request(
                transfer.grant_id, needed, names, ledger.scheduler.holds_back
            )
        except Fault as fault:
            self._abandon(transfer, fault)
            raise
        if reserved is None and max_wait_s <= 0:
            refusal = self._no_blocks(leg)
            ledger.reservations.leave(transfer.grant_id)
            self._abandon(transfer, refusal)
            raise refusal
        if reserved is None:
            ledger.move(transfer, DecodeState.WAITING)
            return True
        ledger.grant(transfer, reserved)
        return False

    def _leave_queue(self, transfer: Transfer, fault: Fault | None) -> None:
        ledger = self._ledger
        ledger.reservations.leave(transfer.grant_id)
        ledger.cancel_timer(transfer, TransferTimer.MAX_WAIT)
        if transfer.client is not None:
            ledger.move(transfer, DecodeState.EXPECTED)
        self._abandon(transfer, fault)

    def _abandon(self, transfer: Transfer, fault: Fault | None) -> None:
        """Without a grant: the client's leg keeps it, or it is forgotten, so that P may ask
        again."""
        if transfer.client is None:
            self._ledger.drop(transfer, fault)
        else:
            transfer.prefill = None

    def _cache_info(self, transfer: Transfer) -> decode_pb2.AllocateResponse:
        leg = transfer.prefill
        assert leg is not None
        answer = decode_pb2.AllocateResponse(
            grant_id=transfer.grant_id,
            transport=plain_transport(transfer.carrier.transport),
            kv_format=transfer.carrier.kv_format,
            lease=duration(self._ledger.config.lease_s),
        )
        if leg.request.kv_needed:
            for start, count in self._ledger.reuse.wanted(transfer):
                answer.wanted.add(start=start, count=count)
            answer.cached_tokens = transfer.cached_tokens
            shards = self._ledger.sessions.shards
            answer.shards.extend(transfer.carrier.shard(shard) for shard in shards)
        return answer

    def _owned(self, transfer: Transfer, session: Session) -> None:
        if transfer.local:
            raise Fault(Reason.NOT_OWNER, f"{transfer.key} belongs to no prefill")
        if transfer.owner is not None and transfer.owner != session.owner:
            text = f"{transfer.key} belongs to prefill {transfer.owner.name}"
            raise Fault(Reason.NOT_OWNER, text, {"owner": transfer.owner.name})

    # First token and release

    def first_token(self, event: FirstTokenCalled) -> None:
        """Take the first token in."""
        try:
            state = self._first_token(event.request)
        except Fault as fault:
            self._ledger.act(Refuse(event.call, fault))
            return
        self._ledger.act(Answer(event.call, decode_pb2.SendFirstTokenResponse(state=state)))

    def release(self, event: ReleaseCalled) -> None:
        """Take a transfer back."""
        try:
            state = self._release(event.request)
        except Fault as fault:
            self._ledger.act(Refuse(event.call, fault))
            return
        self._ledger.act(Answer(event.call, decode_pb2.ReleaseResponse(state=state)))

    def _first_token(self, request: decode_pb2.SendFirstTokenRequest) -> types_pb2.TransferState:
        ledger = self._ledger
        session = ledger.sessions.of_call(request.session_id)
        check_ref(request.ref, self._limits.instance, any_epoch=False)
        key = key_of(request.ref)
        ended = ledger.tombstones.get(key, ledger.now)
        if ended is not None:
            ledger.late()
            return ended.state.wire
        transfer = ledger.of_key(key)
        if transfer is None or transfer.prefill is None:
            ledger.check_attempt(key)
            raise Fault(Reason.UNKNOWN_TRANSFER, f"{key} is unknown here")
        self._owned(transfer, session)
        if transfer.prefill.response is None or request.grant_id != transfer.grant_id:
            text = f"{key} is {transfer.state.name} and has no grant {request.grant_id!r}"
            raise Fault(Reason.WRONG_STATE, text, {"state": transfer.state.name})
        self._check_first(transfer, request)
        if transfer.first is None:
            transfer.computed_tokens = request.computed_tokens
        self._handoff.first_token(transfer, request.tokens[0])
        return transfer.state.wire

    def _check_first(self, transfer: Transfer, request: decode_pb2.SendFirstTokenRequest) -> None:
        assert transfer.prefill is not None
        if len(request.tokens) != 1:
            raise bad_request([FieldError("tokens", "must have exactly one")])
        token = request.tokens[0]
        if token.sibling:
            feature = {"feature": "tokens[0].sibling"}
            raise Fault(Reason.FEATURE, "tokens[0].sibling is not supported", feature)
        wrong = []
        if token.finish_reason not in types_pb2.FinishReason.values():
            limit = f"{token.finish_reason} is no reason"
            wrong.append(FieldError("tokens[0].finish_reason", limit))
        if token.token_id >= self._limits.vocab_size:
            limit = f"ids are below {self._limits.vocab_size}"
            wrong.append(FieldError("tokens[0].token_id", limit))
        if not transfer.prefill.request.kv_needed and not token.finish_reason:
            limit = "must be set when kv_needed was false"
            wrong.append(FieldError("tokens[0].finish_reason", limit))
        wrong += first_logprobs_errors(token, transfer.prefill.request.sampling)
        if wrong:
            raise bad_request(wrong)
        if transfer.first is not None and transfer.first != token:
            text = f"{transfer.key} has another first token already"
            raise Fault(Reason.DUPLICATE_TRANSFER, text)

    def _release(self, request: decode_pb2.ReleaseRequest) -> types_pb2.TransferState:
        ledger = self._ledger
        session = ledger.sessions.of_call(request.session_id)
        check_ref(request.ref, self._limits.instance, any_epoch=False)
        key = key_of(request.ref)
        cause = read_status(request.cause) if request.cause.code else None
        fault = _as_fault(cause)
        stopped = request.writes_stopped and ledger.quarantine.prefill_stopped(key, session.owner)
        ended = ledger.tombstones.get(key, ledger.now)
        if ended is not None:
            if not stopped:
                ledger.late()
            return ended.state.wire
        transfer = ledger.of_key(key)
        if transfer is None:
            # It overtook its Allocate: remember it, so that the Allocate is refused.
            transfer = ledger.create(key, DecodeState.EXPECTED, ledger.config.request_budget_s)
        self._owned(transfer, session)
        if transfer.handed_off:
            return transfer.state.wire
        state = DecodeState.RELEASED if fault is None else DecodeState.FAILED
        ledger.end(transfer, state, fault, tell_prefill=False)
        if request.writes_stopped:
            ledger.quarantine.prefill_stopped(key, session.owner)
        return state.wire


def body_of(request: decode_pb2.AllocateRequest) -> bytes:
    """What makes two Allocates the same: all but the session, max_wait and budget."""
    body = decode_pb2.AllocateRequest()
    body.CopyFrom(request)
    for name in ("session_id", "max_wait", "budget"):
        body.ClearField(name)
    return body.SerializeToString(deterministic=True)


def _as_fault(cause: Fault | TransportFault | None) -> Fault | None:
    if cause is None or isinstance(cause, Fault):
        return cause
    text = f"the prefill gave up: {cause}"
    return Fault(Reason.PREFILL_LOST, text, {"cause": cause.code.name})
