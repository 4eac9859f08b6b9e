"""The shell of one routed request: its attempts, its timer, and what waits for the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from opentelemetry.trace import Span

from pd_grpc.protocol.failures import ROUTER_METADATA
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.refs import TransferKey, mint_id
from pd_grpc.router.elsewhere import Elsewhere
from pd_grpc.router.intake import RoutableRequest
from pd_grpc.router.legs import AttemptLegs
from pd_grpc.router.machine import INSTANCE, Fail, Finish, RoutingTimes
from pd_grpc.router.machine import Action as AttemptAction
from pd_grpc.router.outbox import Outbox
from pd_grpc.router.policies import Pairing
from pd_grpc.router.recovery import FIRST_ATTEMPT, Action, Begin, RecoveringRequest, Seek
from pd_grpc.router.routing import Routing
from pd_grpc.router.spans import of_recovery
from pd_grpc.router.suspects import Blame
from pd_grpc.router.timing import AnswerTimes
from pd_grpc.router.unread import Unread
from pd_grpc.telemetry import names
from pd_grpc.telemetry.log_events import Event
from pd_grpc.telemetry.tracing import Tracing, inject, trace_id
from pd_grpc.v1 import admin_pb2, inference_pb2, types_pb2


class RoutedCall:
    """Drives a `RecoveringRequest`: performs its actions, feeds it what the legs and the clock say.

    Made, used and closed by the handler of one client call, whose `span` it marks.
    """

    def __init__(
        self,
        routing: Routing,
        request: RoutableRequest,
        pairing: Pairing,
        times: AnswerTimes,
        budget_ends: float,
        span: Span,
        tracing: Tracing,
        unread: Unread,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is told whenever the request may stand otherwise than before."""
        config = routing.config
        context = Tracing.context(span)
        self._transfer_id = mint_id("t")
        self._routing = routing
        self._request = request
        self._times = times
        self._tracing = tracing
        self._span = span
        self._metadata = [*inject(context), (ROUTER_METADATA, routing.name)]
        self._machine = RecoveringRequest(
            pairing,
            RoutingTimes(config.grace_s, config.settle_s),
            routing.recovery,
            budget_ends,
            FIRST_ATTEMPT,
        )
        self._elsewhere = Elsewhere(routing, request, self._machine)
        self._unread = unread
        self._outbox = Outbox(routing.tokenizer, request.sampling, unread, request.generated)
        self._output = list(request.generated)
        self._attempt_began_with = len(self._output)
        self._wake = asyncio.Event()
        self._on_change = on_change
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching = False
        self._legs = self._new_legs()
        self._last: inference_pb2.GenerateResponse | None = None
        self._named = False
        self.fault: Fault | None = None
        """What it has failed with."""
        self._state = types_pb2.TRANSFER_STATE_ROUTED
        self._since = times.accepted
        self._on_routed: Callable[[float], None] = lambda at: None

    @property
    def key(self) -> TransferKey:
        """The transfer it minted, with the current attempt."""
        return TransferKey(self._transfer_id, self._machine.attempt)

    @property
    def finished(self) -> bool:
        """Whether the answer is whole."""
        return self._state == types_pb2.TRANSFER_STATE_FINISHED

    @property
    def machine(self) -> RecoveringRequest:
        """Its rules, to be looked at."""
        return self._machine

    # --- for the handler --------------------------------------------------------------------------

    def start(self, routed: Callable[[float], None]) -> None:
        """Open both legs; `routed` is told once, and when it was, that the request has come to P.
        Where there is no P, or it never says a word, that is when the legs were open."""
        self._routing.in_flight.add(self)
        self._on_routed = routed
        self.spawn(self._start())

    async def next_message(self) -> inference_pb2.GenerateResponse | None:
        """The next message for the client, with everything that is ready; None at the end.

        Fault when the request has failed; tokens that came before are given out first.
        """
        while not self.has_message:
            if self.fault is not None:
                raise self.fault
            if self._machine.ended:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self.take()

    @property
    def has_message(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._outbox) or (self.finished and self._last is not None)

    def take(self) -> inference_pb2.GenerateResponse:
        """What `next_message` returns, if `has_message`."""
        message = self._outbox.take()
        if not self._named:
            self._named, message.request_id = True, self._request.request_id
        if self.finished and not self._outbox:
            last, self._last = self._last, None
            if last is not None:
                self._complete(message, last)
        return message

    def leave(self) -> None:
        """End it without a word, unless it has ended. What has come may still be taken."""
        self._perform(self._machine.on_client_gone(self._now()))

    async def close(self) -> None:
        """End whatever is still open; returns when no task of the request is left."""
        self.leave()
        self._span.set_attributes({**self._pair(), names.ATTR_OUTPUT_TOKENS: self._times.tokens})
        if self._timer is not None:
            self._timer.cancel()
        try:
            if self.finished:
                await self._legs.statuses()
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        self._legs.close()
        if self._times.opened is not None:
            self._is_routed(self._times.opened)
        if self._state in (types_pb2.TRANSFER_STATE_ROUTED, types_pb2.TRANSFER_STATE_STREAMING):
            self._state_is(types_pb2.TRANSFER_STATE_CANCELLED)
        self._routing.in_flight.remove(self)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # They know this call: a prompt and two calls of gRPC's would wait for the cyclic collector.
        del self._legs

    # --- for an operator --------------------------------------------------------------------------

    def info(self) -> admin_pb2.TransferInfo:
        """As AdminService shows it."""
        now, pairing = self._now(), self._machine.pairing
        names = [t.name for t in (pairing.prefill, self._machine.decode) if t is not None]
        info = admin_pb2.TransferInfo(
            ref=self.key.ref(),
            request_id=self._request.request_id,
            state=self._state,
            age=duration(now - self._times.accepted),
            state_age=duration(now - self._since),
            peer=" > ".join(names),
            prompt_tokens=len(self._request.token_ids),
            generated_tokens=len(self._request.generated) + self._machine.tokens,
        )
        if self.fault is not None:
            info.last_error.CopyFrom(self.fault.status())
        if not self._machine.ended:
            info.holder = "the client's stream"
            stage = f"stage '{self._machine.stage}'"
            info.waits_for = "another instance" if self._machine.seeking else stage
            if (at := self._machine.next_timer()) is not None:
                info.next_timer = self._machine.timer_at(at)
                info.next_timer_in.CopyFrom(duration(at - now))
        return info

    def fail(self, fault: Fault) -> None:
        """End it with a fault, unless it has ended."""
        self._perform(self._machine.on_fault(fault, self._now()))

    # --- actions ----------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._perform(self._machine.start(self._now()))
        self._times.opened = self._now()
        if self._machine.pairing.prefill is None:
            self._is_routed(self._times.opened)

    def _is_routed(self, at: float) -> None:
        if self._times.routed is None:
            self._times.routed = at
            self._on_routed(at)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Begin():
                    self._begin(action)
                case Seek(blame):
                    self._seek(blame)
                case Finish():
                    self._outbox.close()
                    self._state_is(types_pb2.TRANSFER_STATE_FINISHED)
                case Fail(fault):
                    self.fault = fault
                    released = fault.reason is Reason.RELEASED
                    failed = types_pb2.TRANSFER_STATE_FAILED
                    self._state_is(types_pb2.TRANSFER_STATE_RELEASED if released else failed)
                case _:
                    self._legs.perform(action)
        if actions:
            self._wake.set()
            self._on_change()
        self._set_timer()

    def _new_legs(self) -> AttemptLegs:
        return AttemptLegs(
            self,
            self._routing,
            self._request,
            self._output,
            self.key,
            self._machine.request,
            self._metadata,
            self._unread,
        )

    def _begin(self, begin: Begin) -> None:
        self._legs.close()
        self._legs = self._new_legs()
        self._attempt_began_with = len(self._output)
        self._span.set_attribute(names.ATTR_ATTEMPT, begin.attempt)
        self._span.set_attributes(self._pair())
        self._tracing.event(self._span, names.EVENT_RECOVERY, attributes=of_recovery(begin))
        text = f"{begin.kind.value} elsewhere: {begin.fault.message}"
        self._note(Event.REQUEST_ELSEWHERE, text, begin.fault)
        self._routing.in_flight.changed(self)

    def _pair(self) -> dict[str, str]:
        """Whom the current attempt is with."""
        prefill, decode = self._machine.pairing.prefill, self._machine.decode
        told = {names.ATTR_DECODE: decode.name}
        return told if prefill is None else {names.ATTR_PREFILL: prefill.name, **told}

    def _seek(self, blame: Blame) -> None:
        machine, now = self._machine, self._now()
        if (finish := self._elsewhere.end_of_answer(self._output)) is not None:
            usage = types_pb2.Usage(
                prompt_tokens=len(self._request.token_ids), completion_tokens=len(self._output)
            )
            self._last = inference_pb2.GenerateResponse(finish_reason=finish.wire, usage=usage)
            self._perform(machine.on_whole(now))
            return
        pairing = self._elsewhere.another_pair(blame)
        if pairing is not None:
            self._perform(machine.on_pairing(pairing, now))
            return
        self._perform(machine.on_nowhere(self._elsewhere.out_of_reach(blame), now))
        if machine.waiting and not self._watching:
            self._watching = True
            self.spawn(self._watch_instances())

    async def _watch_instances(self) -> None:
        while True:
            self._perform(self._machine.on_instances())
            if not self._machine.waiting:
                break
            await self._routing.discovery.changed()
        self._watching = False

    def _on_timer(self) -> None:
        self._timer = None
        self.spawn(self._pass_time())

    async def _pass_time(self) -> None:
        self._perform(self._machine.on_time(self._now()))

    # --- what the legs bring ----------------------------------------------------------------------

    def took(self, actions: list[AttemptAction]) -> None:
        """See `legs.Call`."""
        self._perform(self._machine.after(actions, self._now()))
        self._on_change()

    def came(self, message: inference_pb2.GenerateResponse) -> None:
        """See `legs.Call`."""
        if message.token_ids:
            self._note_tokens(len(message.token_ids))
            self._output += message.token_ids
            self._outbox.push(message)
            self._wake.set()
        if message.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
            self._last = message

    def queued(self) -> None:
        """See `legs.Call`."""
        if self._machine.attempt == FIRST_ATTEMPT:
            self._is_routed(self._times.answered(self._now()))

    def handed_off(self, timings: types_pb2.Timings) -> None:
        """See `legs.Call`."""
        if self._brought_the_first_token():
            self._times.prefill = timings

    def _note_tokens(self, tokens: int) -> None:
        times, now = self._times, self._now()
        had_second = times.second_token_at is not None
        if times.came(tokens, now):
            self._tracing.event(self._span, names.EVENT_FIRST_TOKEN, at=now)
            self._state_is(types_pb2.TRANSFER_STATE_STREAMING)
        if not had_second and times.second_token_at is not None:
            self._tracing.event(self._span, names.EVENT_SECOND_TOKEN, at=now)

    def _brought_the_first_token(self) -> bool:
        """Whether the current attempt did, or may yet."""
        return self._attempt_began_with == len(self._request.generated)

    # --- bookkeeping ------------------------------------------------------------------------------

    def _complete(
        self, message: inference_pb2.GenerateResponse, last: inference_pb2.GenerateResponse
    ) -> None:
        pairing, decode = self._machine.pairing, self._machine.decode
        message.finish_reason = last.finish_reason
        message.usage.CopyFrom(last.usage)
        if pairing.prefill is None and self._brought_the_first_token():
            self._times.prefill = last.timings
        message.timings.CopyFrom(self._times.timings(self._now()))
        message.prefill_instance = (pairing.prefill or decode).name
        message.decode_instance = last.decode_instance or decode.name

    def _state_is(self, state: types_pb2.TransferState) -> None:
        self._state, self._since = state, self._now()
        if not self._machine.ended:
            self._routing.in_flight.changed(self)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._machine.next_timer()) is not None:
            delay = max(0.0, at - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """See `legs.Call`. What it raises fails the request, be it that a leg cannot be opened."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        fault = Fault(Reason.ENGINE_ERROR, f"the router failed: {type(error).__name__}")
        self._note(Event.DEFECT, "a request failed of the router", fault, error)
        self._perform(self._machine.on_fault(fault, self._now()))

    def _note(
        self, event: Event, text: str, fault: Fault, error: BaseException | None = None
    ) -> None:
        transfer_id, attempt = self.key
        self._routing.log.note(
            event,
            "%s",
            text,
            error=error,
            transfer_id=transfer_id,
            attempt=attempt,
            request_id=self._request.request_id,
            trace_id=trace_id(Tracing.context(self._span)),
            peer=fault.metadata.get(INSTANCE, ""),
            reason=fault.reason.value,
        )

    def _now(self) -> float:
        return self._routing.clock.now()
