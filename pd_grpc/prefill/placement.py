"""From a request to a grant: its turn to ask, the Allocate, and the way to an alternate D."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from pd_grpc.prefill.actions import CancelAllocate, SendAllocate
from pd_grpc.prefill.asking import allocate_request, objection
from pd_grpc.prefill.carriers import INLINE_ALONE, Carriers
from pd_grpc.prefill.conversations import Conversations, Fail
from pd_grpc.prefill.decode_faults import (
    again_in,
    another_may_do,
    as_fault,
    has_no_room,
    is_ours_to_end,
    is_silence,
    no_answer,
    unavailable,
)
from pd_grpc.prefill.events import AllocateAnswered, AnyFault
from pd_grpc.prefill.grants import grant_problem, read_grant
from pd_grpc.prefill.prepare import PrepareLimits, PreparePool
from pd_grpc.prefill.releases import Releases
from pd_grpc.prefill.requests import Requests
from pd_grpc.prefill.sessions import DecodeSession, Phase
from pd_grpc.prefill.states import PrefillRecord, PrefillState
from pd_grpc.prefill.validation import ModelLimits
from pd_grpc.prefill.writing import Writing
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import RETRY_AFTER_S, Fault, Reason
from pd_grpc.protocol.messages import seconds
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2, prefill_pb2, types_pb2

_MET_BY_BOTH_LEGS = frozenset({Reason.CLIENT_GONE, Reason.STAGE_DEADLINE, Reason.SUPERSEDED})
"""Ends of which a D that was asked for nothing needs no word of P's: its own leg meets them."""


class Placement:
    """Finds a D for each request, and takes leave of it at the end."""

    def __init__(
        self,
        requests: Requests,
        config: PrefillConfig,
        instance: types_pb2.Instance,
        limits: ModelLimits,
        fail: Fail,
        granted: Callable[[PrefillRecord], None],
        session_up: Callable[[PrefillRecord, float], None],
        carriers: Carriers = INLINE_ALONE,
    ) -> None:
        """`granted` takes a request over; `session_up` hears of each that holds a grant when its
        session is there again."""
        # Another for each process, and the same whenever its events are played again.
        self.pool = PreparePool(PrepareLimits.of(config), Random(instance.epoch).random)
        self.conversations = Conversations(requests, config, instance, limits, self, fail, carriers)
        self.releases = Releases(requests, config, self.conversations)
        self.writing = Writing(self.conversations, self.releases)
        self._requests = requests
        self._config = config
        self._limits = limits
        self._fail = fail
        self._granted = granted
        self._session_up = session_up
        self._outlasting: dict[str, float] = {}
        """Ds with an Allocate that is left to its own deadline, and when that is over."""

    # --- a request comes, and goes -------------------------------------------------------------

    def full(self, endpoint: str) -> Fault | None:
        """Why nobody else may wait for a D: as many do here as may."""
        waiting = self.pool.waiting_for(endpoint)
        if waiting < self._config.prefill_queue:
            return None
        text = f"{waiting} requests wait for {endpoint} here"
        return Fault(Reason.QUEUE_FULL, text, retry_after_s=RETRY_AFTER_S)

    def place(self, record: PrefillRecord, now: float) -> None:
        """Let a request wait for the D it turns to."""
        endpoint = record.target.endpoint
        self.pool.enqueue(endpoint, record.key, now)
        if self.pool.admits(endpoint, now):
            self.conversations.bind(record, now)

    def forget(self, record: PrefillRecord, cause: Fault | None, now: float) -> None:
        """A request has ended; D is told unless `cause` is None."""
        asked = record.asking or record.grant is not None
        if cause is not None and (asked or cause.reason not in _MET_BY_BOTH_LEGS):
            # Asked or not, D may have the client's leg, which waits for this transfer.
            self._release(record, cause, now)
        elif record.asking:
            self.writing.asked_in_vain(record, now)
        over = cause is not None and cause.reason is Reason.STAGE_DEADLINE
        if record.asking and over and self._may_outlast(record.target.endpoint, now):
            # The release ends the wait on a D that lives. Of one that does not, the call's own
            # deadline tells, if it is not cancelled.
            record.asking = False
        self._withdraw(record, now)

    def _may_outlast(self, endpoint: str, now: float) -> bool:
        """Whether an Allocate may outlast its request. One at a time tells enough of its D, and no
        window counts it."""
        self._outlasting = {d: until for d, until in self._outlasting.items() if now < until}
        if endpoint in self._outlasting:
            return False
        self._outlasting[endpoint] = now + self._config.allocate_margin_s
        return True

    def tick(self, now: float) -> None:
        """Do what is due."""
        self.pool.tick(now)
        self.releases.tick(now)

    def next_wake(self) -> float | None:
        """When `tick` must be called."""
        wakes = (self.pool.next_wake(), self.releases.next_wake())
        return min((at for at in wakes if at is not None), default=None)

    def decoding_s(self, record: PrefillRecord) -> float:
        """How long its D lately needed after the hand-off of as many tokens; 0 while it has not
        said so, and where it has nothing to do after the first."""
        load = self.conversations[record.target.endpoint].load
        each_s = seconds(load.decoding_each) * (record.max_new_tokens if record.kv_needed else 0)
        return min(seconds(load.decoding), each_s)

    def computed(self, record: PrefillRecord) -> None:
        """A grant is no longer idle."""
        self.pool.computed(record.key)

    def pump(self, now: float) -> bool:
        """Let those ask whose turn it is, and those turn elsewhere whose D may not be asked;
        whether there were any."""
        turned = [self._hold_back(key, fault, now) for key, fault in self.pool.held_back(now)]
        started = self.pool.start(self.conversations.is_open, now)
        for key in started:
            record = self._requests.in_flight[key]
            session = self.conversations[record.target.endpoint]
            fault = objection(record, session)
            if fault is None:
                self._ask(record, session, now)
            else:
                self.turn_away(record, fault, now)
        return bool(started) or any(turned)

    # --- Allocate ------------------------------------------------------------------------------

    def answered(self, event: AllocateAnswered, now: float) -> None:
        """An Allocate has ended."""
        asked = event.asked
        probe = not asked.request.max_wait.ToNanoseconds()
        self._learn(event, probe, now)
        record = self._requests.in_flight.get(asked.key)
        if record is None or not record.asking or record.ask != asked.ask:
            self._requests.late_events += 1
            if event.response is not None:
                self._release_late(asked, now)
        elif event.response is not None:
            self._take(record, event.response, now)
        elif probe and has_no_room(event.fault):
            self._ask_again(record, now)  # It had not been given the time to wait.
        elif probe and is_silence(event.fault):
            # Its own time is not over, and another D may answer.
            self.lose_ask(record, no_answer(asked.endpoint, "allocate"), now)
        elif event.fault is not None:
            self._refused(record, event.fault, now)

    def _ask(self, record: PrefillRecord, session: DecodeSession, now: float) -> None:
        left = record.left(now)
        probe = self.pool.probes(record.key)
        # One that finds out whether D answers at all waits for no blocks.
        max_wait_s = 0.0 if probe else left
        block_size = self._limits.layout.block_size
        request = allocate_request(record, session, max_wait_s, left, block_size)
        record.ask += 1
        record.asking = True
        record.asked_session = session.session_id
        record.asked_epoch = session.instance.epoch
        record.times.allocate = now
        if record.times.first_allocate is None:
            record.times.first_allocate = now
        self._requests.move(record, PrefillState.ALLOCATING, now)
        timeout_s = left + self._config.allocate_margin_s
        if probe:
            timeout_s = min(timeout_s, self._config.call_s)
        ask = SendAllocate(
            record.key, record.ask, session.endpoint, session.link, request, timeout_s
        )
        self._requests.do(ask)

    def _take(
        self, record: PrefillRecord, response: decode_pb2.AllocateResponse, now: float
    ) -> None:
        session = self.conversations[record.target.endpoint]
        ours, layout = self._limits.shards, self._limits.layout
        grant = read_grant(session.endpoint, session.instance, response, ours, layout)
        record.asking = False
        record.grant = grant
        layout, carriers = self._limits.layout, self.conversations.carriers
        problem = grant_problem(grant, record, layout, carriers)
        if problem is not None:
            fault = Fault(Reason.WRONG_STATE, f"the grant of {session.endpoint} is void: {problem}")
            self._fail(record, fault, now, True)
            return
        record.times.granted = now
        session.grants[grant.grant_id] = record.key
        self.pool.answered(record.key, granted=True)
        self._requests.move(record, PrefillState.PREPARED, now)
        self._granted(record)

    def _refused(self, record: PrefillRecord, fault: AnyFault, now: float) -> None:
        session = self.conversations[record.target.endpoint]
        known = session.session_id == record.asked_session and session.phase is Phase.OPEN
        if isinstance(fault, Fault) and fault.reason is Reason.NO_SESSION:
            if not known:
                # The session is being renewed, or was, while the call was under way: ask in the new
                # one's name.
                self._ask_again(record, now)
                return
            # P has yet to hear that the session is gone; a D that has forgotten it is none to wait
            # for, and no mistake of the caller's.
            text = f"{session.endpoint} no longer knows the session with this prefill"
            fault = Fault(Reason.DECODE_LOST, text)
        self.turn_away(record, fault, now)

    def _ask_again(self, record: PrefillRecord, now: float) -> None:
        """Back to the queue of the same D."""
        record.asking = False
        self._requests.move(record, PrefillState.QUEUED, now)
        self.pool.ask_again(record.key)

    # --- whether a D may be asked --------------------------------------------------------------

    def unreachable(self, endpoint: str, fault: Fault, now: float) -> None:
        """A D cannot be reached, or takes nobody in."""
        self.pool.failed(endpoint, fault, now)

    def call_failed(self, endpoint: str, fault: AnyFault | None, stage: str, now: float) -> None:
        """A call other than Allocate has ended; only the transport's word says anything of D."""
        if fault is not None and not isinstance(fault, Fault):
            self._judge(endpoint, fault, stage, now)

    def _learn(self, event: AllocateAnswered, probe: bool, now: float) -> None:
        """What the end of an Allocate says of its D."""
        endpoint, fault = event.asked.endpoint, event.fault
        session = self.conversations.get(endpoint)
        if session is None or session.link != event.asked.link:
            return  # Of a connection that has been replaced.
        if fault is None or (isinstance(fault, Fault) and not unavailable(fault)):
            self.pool.heard(endpoint)
        else:
            self._judge(endpoint, fault, "allocate", now)
        if isinstance(fault, Fault) and has_no_room(fault) and not probe:
            self.pool.back_off(endpoint, fault, now)

    def _judge(self, endpoint: str, fault: AnyFault, stage: str, now: float) -> None:
        if unavailable(fault):
            self.pool.failed(endpoint, as_fault(fault, endpoint, stage), now)
        elif is_silence(fault):
            self.pool.failed(endpoint, no_answer(endpoint, stage), now)

    def _hold_back(self, key: TransferKey, fault: Fault, now: float) -> bool:
        """The D of a request that waits may not be asked. With the breaker open it turns away at
        once; during a back-off only to a D that may be asked now. Whether it did."""
        record = self._requests.in_flight.get(key)
        if record is None or record.state is not PrefillState.QUEUED:
            return False  # It went with one before it.
        endpoint = record.target.endpoint
        if not self.pool.admits(endpoint, now):
            left_s = self.pool.breaker_left_s(endpoint, now)
            text = f"{fault.message}; not asked again for {left_s:.2f} s"
            self.turn_away(record, replace(fault, message=text, retry_after_s=left_s), now)
            return True
        other = self._alternate(record, now)
        if other is None or not self.pool.takes(record.request.decodes[other].endpoint, now):
            return False
        self.turn_away(record, fault, now)
        return True

    # --- another D, or none --------------------------------------------------------------------

    def _alternate(self, record: PrefillRecord, now: float) -> int | None:
        """The D to turn to after the present one, by its place in `decodes`: the first of those
        that follow that may be asked now, or else the first; a D whose queue here is full is none.
        """
        decodes = record.request.decodes
        places = range(record.choice + 1, len(decodes))
        roomy = [place for place in places if self.full(decodes[place].endpoint) is None]
        now_ones = (place for place in roomy if self.pool.takes(decodes[place].endpoint, now))
        return next(now_ones, roomy[0] if roomy else None)

    def turn_away(self, record: PrefillRecord, fault: AnyFault, now: float) -> None:
        """The D it turned to will not have the request: turn to another, or fail."""
        own = as_fault(fault, record.target.endpoint, "allocate")
        unanswered = record.asking and not isinstance(fault, Fault)
        record.asking = False
        goes_on = another_may_do(fault) and record.left(now) > 0
        other = self._alternate(record, now) if goes_on else None
        if unanswered:
            moved = Fault(Reason.RELEASED, f"prefill went on without the answer: {own.message}")
            self._release(record, own if other is None else moved, now)
        if other is None:
            own = again_in(own, self.pool.breaker_left_s(record.target.endpoint, now))
            if not unanswered and is_ours_to_end(own):
                self._release(record, own, now)
            self._fail(record, own, now, False)
            return
        self._withdraw(record, now)
        record.choice = other
        record.asked_epoch = 0
        placing = prefill_pb2.Placing(decode=record.target)
        self._requests.emit(record, prefill_pb2.PrefillResponse(placing=placing))
        if record.state is PrefillState.ALLOCATING:
            self._requests.move(record, PrefillState.QUEUED, now)
        self.place(record, now)

    def lose_ask(self, record: PrefillRecord, fault: Fault, now: float) -> None:
        """An Allocate will not be answered by the D it was sent to."""
        self._cancel(record)
        self._release(record, fault, now)
        record.asking = False
        self.turn_away(record, fault, now)

    def opened(self, session: DecodeSession, now: float) -> None:
        """A D can be reached."""
        self.pool.reached(session.endpoint, now)
        self.releases.opened(session, now)

    def session_up(self, record: PrefillRecord, now: float) -> None:
        """The D that has granted can be reached again."""
        self._session_up(record, now)

    # --- giving back ---------------------------------------------------------------------------

    def _withdraw(self, record: PrefillRecord, now: float) -> None:
        """End what binds a request to the D it turned to."""
        if record.asking:
            self._cancel(record)
            record.asking = False
        self.pool.withdraw(record.key)
        self.conversations.unbind(record, now)

    def _cancel(self, record: PrefillRecord) -> None:
        self._requests.do(CancelAllocate(record.key, record.ask, record.target.endpoint))

    def _release(self, record: PrefillRecord, cause: Fault, now: float) -> None:
        """Tell the D that a request turned to of its end, if there was a session with it."""
        session = self.conversations.get(record.target.endpoint)
        if session is None or not session.session_id:
            return
        epoch = record.asked_epoch or session.instance.epoch
        if not record.asked_epoch and session.phase in (Phase.WAITING, Phase.CONNECTING):
            # Its client may wait at another process than the one that P last spoke to.
            epoch = 0 if record.choice else record.request.ref.decode_epoch
        stopped = self.writing.stopped(record)
        self.releases.give_back(
            record.key, session.endpoint, session.session_id, epoch, cause, now, stopped
        )

    def _release_late(self, asked: SendAllocate, now: float) -> None:
        """A grant came for a request that has gone on without it."""
        cause = Fault(Reason.RELEASED, "the grant came after the request had ended or moved on")
        session_id, epoch = asked.request.session_id, asked.request.ref.decode_epoch
        self.releases.give_back(asked.key, asked.endpoint, session_id, epoch, cause, now)
