"""From the first chunk to the hand-off: KV streams to D's shards, the first token, and the moment
D has both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pd_grpc.engine.base import Sampled, Tokenizer
from pd_grpc.engine.stopping import Finish, StopRule
from pd_grpc.prefill.actions import CloseTransfer, OpenTransfer, SendFirstToken
from pd_grpc.prefill.conversations import Conversations, Fail
from pd_grpc.prefill.decode_faults import (
    as_fault,
    end_state_fault,
    is_silence,
    no_answer,
    our_mistake,
)
from pd_grpc.prefill.events import (
    AnyFault,
    FirstTokenAnswered,
    KvAcked,
    TransferBroken,
    TransferClosed,
)
from pd_grpc.prefill.grants import send_plan
from pd_grpc.prefill.requests import Requests, Timer
from pd_grpc.prefill.sender_watch import SenderWatch
from pd_grpc.prefill.sessions import DecodeSession, backoff_s
from pd_grpc.prefill.shard_silence import ShardSilence
from pd_grpc.prefill.states import Grant, PrefillRecord, PrefillState, Stream
from pd_grpc.prefill.validation import ModelLimits
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason, TransportFault
from pd_grpc.protocol.messages import plain_transport, seconds
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2, layout_pb2, transfer_pb2, types_pb2

_GONE = frozenset(
    {
        types_pb2.TRANSFER_STATE_FAILED,
        types_pb2.TRANSFER_STATE_RELEASED,
        types_pb2.TRANSFER_STATE_EXPIRED,
    }
)
_TAKEN = frozenset(
    {
        types_pb2.TRANSFER_STATE_RESERVED,
        types_pb2.TRANSFER_STATE_RECEIVING,
        types_pb2.TRANSFER_STATE_READY,
        types_pb2.TRANSFER_STATE_DECODING,
        types_pb2.TRANSFER_STATE_PREEMPTED,
        types_pb2.TRANSFER_STATE_FINISHED,
    }
)
_FINISH = {
    Finish.STOP: types_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}


class Handover:
    """Sends what is computed, and says when D has it."""

    def __init__(
        self,
        requests: Requests,
        config: PrefillConfig,
        limits: ModelLimits,
        tokenizer: Tokenizer,
        conversations: Conversations,
        fail: Fail,
        handed_off: Callable[[PrefillRecord, float], None],
    ) -> None:
        """`handed_off` ends a request that D owns now."""
        self._requests = requests
        self._config = config
        self._limits = limits
        self._tokenizer = tokenizer
        self._conversations = conversations
        self._fail = fail
        self._handed_off = handed_off
        self.silence = ShardSilence(requests, config, conversations, fail)
        self.watch = SenderWatch(requests, config, limits.layout, conversations, fail)

    # --- KV ------------------------------------------------------------------------------------

    def starting(self, record: PrefillRecord, now: float) -> None:
        """A request has its blocks: open every stream, before anything is computed."""
        assert record.grant is not None
        if record.kv_needed:
            for strand in range(len(record.grant.strands)):
                self._open(record, strand, now)

    def acked(self, event: KvAcked, now: float) -> None:
        """A shard has acknowledged KV."""
        record = self._requests.in_flight.get(event.key)
        if record is None:
            self._requests.late_events += 1
            return
        record.times.kv_acked = now
        record.acked_bytes[event.strand] = event.acked_bytes
        self.silence.ended(record, event.strand)

    def completed(self, key: TransferKey, strand: int, now: float) -> None:
        """A shard has everything that goes over a strand."""
        record = self._ended(key, strand, Stream.COMPLETED)
        if record is not None:
            record.times.kv_acked = now
            self.silence.ended(record, strand)
            self._try_hand_off(record, now)

    def closed(self, event: TransferClosed) -> None:
        """The bulk side has let go of a transfer."""
        record = self._requests.get(event.key)
        if record is not None and not event.stopped:
            record.may_land = True
        self._ended(event.key, event.strand, Stream.CLOSED)

    def broken(self, event: TransferBroken, now: float) -> None:
        """A stream has ended too early. D's own word is final; without one it is opened again,
        unless it may not have stopped: the next one would end with the word that it has."""
        record = self._requests.get(event.key)
        if record is not None and not event.stopped:
            record.may_land = True
        if record is None or record.streams.get(event.strand) is not Stream.OPEN:
            self._requests.late_events += 1
            return
        owed = self.watch.owes(record, event.strand)
        record.streams[event.strand] = Stream.BROKEN
        assert record.grant is not None
        fault = event.fault
        if is_silence(fault) and record.left(now) > 0:
            # The stream's own time is over and not the request's: another D may take its KV.
            fault = no_answer(record.grant.endpoint, "transfer")
        # A session that was replaced meanwhile is as good as a connection that was.
        again = fault.reason is Reason.NO_SESSION if isinstance(fault, Fault) else fault.peer_lost
        if not again or record.may_land:
            self._fail(record, _of_transfer(fault, record), now, True)
            return
        again_at = now + self._config.reconnect_min_s
        self._requests.timers.set(Timer("reopen", record.key, event.strand), again_at)
        lost = isinstance(fault, TransportFault)
        why = _of_transfer(fault, record) if lost else None
        self.silence.lost(record, event.strand, why, owed, now)

    def reopen(self, key: TransferKey, strand: int, now: float) -> None:
        """The back-off of a broken stream is over. Without a session it waits for the next one."""
        record = self._requests.in_flight.get(key)
        if record is None or record.grant is None:
            return
        if record.streams.get(strand) is Stream.BROKEN and self._reachable(record):
            self._open(record, strand, now)

    def session_up(self, record: PrefillRecord, now: float) -> None:
        """D can be reached again: go on with what waited for that."""
        for strand, stream in record.streams.items():
            waiting = self._requests.timers.at(Timer("reopen", record.key, strand)) is None
            if stream is Stream.BROKEN and waiting:
                self._open(record, strand, now)
        undelivered = record.first_token is not None and not record.first_token_delivered
        if undelivered and not record.first_token_in_flight:
            self._send_first_token(record, now)

    def forget(self, record: PrefillRecord) -> None:
        """A request has ended: send nothing more for it."""
        for strand, stream in record.streams.items():
            if stream in (Stream.OPEN, Stream.BROKEN):
                record.streams[strand] = Stream.CLOSING
                self._requests.do(CloseTransfer(record.key, strand))

    def _open(self, record: PrefillRecord, strand: int, now: float) -> None:
        grant = record.grant
        assert grant is not None
        way = grant.strands[strand]
        session = self._conversations[grant.endpoint]
        record.transport = self._transport(session, grant)
        message = transfer_pb2.TransferOpen(
            session_id=session.session_id,
            ref=_ref(record),
            grant_id=grant.grant_id,
            transport=plain_transport(record.transport),
            shard_index=way.receiver,
            kv_format=grant.kv_format,
        )
        if len(grant.shards) > 1 or len(self._limits.shards) > 1:
            message.sender.CopyFrom(self._limits.shards[way.sender].to_proto())
            message.sends.CopyFrom(way.part.to_proto())
        plan = send_plan(grant, strand, record, self._limits.layout)
        record.streams[strand] = Stream.OPEN
        self.watch.opened(record)
        self._requests.do(
            OpenTransfer(
                record.key,
                strand,
                grant.endpoint,
                grant.shards[way.receiver].endpoint,
                message,
                plan,
                session.kv_progress_s,
                record.left(now),
                way.sender,
            )
        )

    def _transport(self, session: DecodeSession, grant: Grant) -> layout_pb2.Transport:
        """That of the grant, unless it did not get us there in the session that we have now."""
        chosen = plain_transport(grant.transport)
        if chosen == plain_transport(session.welcome.transport):
            return chosen
        return layout_pb2.TRANSPORT_INLINE

    def _ended(self, key: TransferKey, strand: int, end: Stream) -> PrefillRecord | None:
        """Note a stream's end; the record if it is still in flight."""
        record = self._requests.get(key)
        if record is None or not record.streams.get(strand, Stream.CLOSED).uses_blocks:
            self._requests.late_events += 1
            return None
        record.streams[strand] = end
        if record.state.terminal:
            self._requests.return_blocks(record)
            return None
        return record

    # --- the first token -----------------------------------------------------------------------

    def computed(self, record: PrefillRecord, sampled: Sampled, now: float) -> None:
        """The first token is known: hand it over while the last KV is on its way."""
        record.first_token = sampled
        record.times.first_token = now
        record.finish = self._stop_rule(record).push(sampled.token_id)
        if record.finish is None and sampled.last:
            record.finish = Finish.STOP
        self._requests.move(record, PrefillState.SENDING, now)
        self._send_first_token(record, now)
        if record.finish is not None:
            self.forget(record)

    def first_token_answered(self, event: FirstTokenAnswered, now: float) -> None:
        """SendFirstToken has ended."""
        record = self._requests.in_flight.get(event.key)
        if record is None or event.attempt != record.first_token_tries:
            self._requests.late_events += 1
            return
        record.first_token_in_flight = False
        if event.state is not None:
            self._delivered(record, event.state, now)
            return
        assert event.fault is not None
        fault = as_fault(event.fault, record.target.endpoint, "first_token")
        fault = our_mistake(fault, "the first token")
        if fault.reason is Reason.STAGE_DEADLINE and isinstance(event.fault, TransportFault):
            # The call's own time is over, not the request's: D is silent.
            text = f"the decode instance at {record.target.endpoint} did not take the first token"
            fault = Fault(Reason.DECODE_LOST, text)
        if fault.reason not in (Reason.DECODE_LOST, Reason.NO_SESSION):
            self._fail(record, fault, now, True)
        elif self._reachable(record):
            self._send_again(record, fault, now)

    def resend_first_token(self, key: TransferKey, now: float) -> None:
        """The back-off of a first token is over. Without a session it waits for the next one."""
        record = self._requests.in_flight.get(key)
        if record is not None and not record.first_token_in_flight and self._reachable(record):
            self._send_first_token(record, now)

    def _send_again(self, record: PrefillRecord, fault: Fault, now: float) -> None:
        """D was lost under SendFirstToken, and its session says nothing of that yet."""
        assert record.grant is not None
        session = self._conversations[record.grant.endpoint]
        wait_s = backoff_s(self._config, record.first_token_tries)
        if session.session_id != record.first_token_session:
            self._send_first_token(record, now)
            return
        if record.first_token_until is None:
            grace_s = max(seconds(session.welcome.grace), wait_s)
            record.first_token_until = now + grace_s
        if now >= record.first_token_until:
            self._fail(record, fault, now, True)
        else:
            at = min(now + wait_s, record.first_token_until)
            self._requests.timers.set(Timer("first_token", record.key), at)

    def _delivered(self, record: PrefillRecord, state: types_pb2.TransferState, now: float) -> None:
        if state in _GONE:
            self._fail(record, end_state_fault(state), now, False)
            return
        if state not in _TAKEN:
            text = f"the decode instance answered the first token with state {int(state)}"
            fault = Fault(Reason.WRONG_STATE, text, {"state": str(int(state))})
            self._fail(record, fault, now, True)
            return
        record.first_token_delivered = True
        record.times.first_token_answered = now
        if state == types_pb2.TRANSFER_STATE_FINISHED:
            # It was answered to the end, so no KV is missing whose acknowledgement is on its way.
            self._handed_off(record, now)
        else:
            self._try_hand_off(record, now)

    def _try_hand_off(self, record: PrefillRecord, now: float) -> None:
        all_sent = all(stream is Stream.COMPLETED for stream in record.streams.values())
        if record.first_token_delivered and (record.finish is not None or all_sent):
            self._handed_off(record, now)

    def _send_first_token(self, record: PrefillRecord, now: float) -> None:
        assert record.grant is not None and record.first_token is not None
        session = self._conversations[record.grant.endpoint]
        request = decode_pb2.SendFirstTokenRequest(
            session_id=session.session_id,
            ref=_ref(record),
            grant_id=record.grant.grant_id,
            tokens=[_first_token(record)],
            computed_tokens=record.computed - record.cached_tokens,
        )
        record.first_token_tries += 1
        record.first_token_in_flight = True
        if record.first_token_session != session.session_id:
            record.first_token_session = session.session_id
            record.first_token_until = None
        self._requests.timers.cancel(Timer("first_token", record.key))
        timeout_s = min(self._config.call_s, record.left(now))
        self._requests.do(
            SendFirstToken(
                record.key, record.first_token_tries, record.grant.endpoint, request, timeout_s
            )
        )

    def _stop_rule(self, record: PrefillRecord) -> StopRule:
        # The model's own limit ends an answer as max_tokens does.
        room = self._limits.max_model_len - len(record.request.token_ids)
        sampling = replace(record.sampling, max_tokens=min(record.sampling.max_tokens, room))
        generated = record.request.generated_token_ids
        return StopRule(sampling, self._limits.eos_token_ids, self._tokenizer, generated)

    def _reachable(self, record: PrefillRecord) -> bool:
        return record.grant is not None and self._conversations.is_open(record.grant.endpoint)


def _ref(record: PrefillRecord) -> types_pb2.TransferRef:
    assert record.grant is not None
    return record.key.ref(record.grant.decode.epoch)


def _first_token(record: PrefillRecord) -> decode_pb2.FirstToken:
    sampled = record.first_token
    assert sampled is not None
    token = decode_pb2.FirstToken(
        token_id=sampled.token_id,
        finish_reason=types_pb2.FINISH_REASON_UNSPECIFIED
        if record.finish is None
        else _FINISH[record.finish],
    )
    if record.sampling.logprobs is not None:
        chosen = types_pb2.TokenLogprob(token_id=sampled.token_id, logprob=sampled.logprob)
        top = [types_pb2.TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in sampled.top]
        token.logprobs.CopyFrom(types_pb2.PositionLogprobs(chosen=chosen, top=top))
    return token


def _of_transfer(fault: AnyFault, record: PrefillRecord) -> Fault:
    """What a Transfer's end means for the request."""
    grant = record.grant
    assert grant is not None
    own = our_mistake(as_fault(fault, grant.endpoint, "transfer"), "the KV")
    if own.reason is Reason.STALE_EPOCH:
        # The process that granted is gone; of P's own epoch nothing is wrong.
        return Fault(Reason.DECODE_LOST, f"decode instance {grant.decode.name} was restarted")
    return own
