"""The shell around D's machine: it feeds events on the control loop and carries actions out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from opentelemetry.context import Context

from pd_grpc.decode import actions as act
from pd_grpc.decode import events as ev
from pd_grpc.decode.bulk import BulkServer
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.outbox import SessionOutbox, TokenOutbox
from pd_grpc.decode.request_log import RequestLog
from pd_grpc.decode.session_log import SessionLog
from pd_grpc.decode.spans import DecodeSpans
from pd_grpc.decode.states import DecodeState
from pd_grpc.engine.base import Engine, EngineFault, Sampled
from pd_grpc.engine.grammar_check import GrammarCheck
from pd_grpc.engine.thread import EngineThread
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.driver import Driver
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import transport_label
from pd_grpc.protocol.refs import TransferKey, key_of
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.v1 import decode_pb2, inference_pb2

UnaryFuture = asyncio.Future[act.UnaryAnswer]


class DecodeRuntime:
    """Runs a machine on the loop that makes it. `listeners` hear of every change of state."""

    def __init__(
        self,
        machine: DecodeMachine,
        engine: Engine,
        clock: Clock,
        spans: DecodeSpans,
        set_ready: Callable[[bool, str], None],
        log: InstanceLog,
    ) -> None:
        self.machine = machine
        self.log = log
        self.drained = asyncio.Event()
        self.listeners: list[Callable[[act.Changed], None]] = []
        self.event_listeners: list[Callable[[ev.Event, float], None]] = []
        """Of every event, with its time, before it is handled."""
        self.fault_listeners: list[Callable[[Fault], None]] = []
        """Of every call that ends with a fault."""
        self._engine = engine
        self._clock = clock
        self.spans = spans
        self._set_ready = set_ready
        self._loop = asyncio.get_running_loop()
        self.requests = RequestLog(log, machine.ledger)
        self._engine_thread = EngineThread(log)
        self.grammar_check = GrammarCheck(engine.grammars)
        self._driver: Driver[ev.Event, act.Action] = Driver(
            machine, clock, self._perform, before=self._hear
        )
        self.feed = self._driver.feed
        self.feed_from_thread = self._driver.feed_from_thread
        self.wake = self._driver.wake
        self._shards: Sequence[BulkServer] = ()
        self._numbers = count(1)
        self._unary: dict[int, UnaryFuture] = {}
        self._keys: dict[int, TransferKey] = {}
        self._clients: dict[int, TokenOutbox] = {}
        self._sessions: dict[int, SessionOutbox] = {}
        self._session_log = SessionLog(log)
        self._refused: dict[int, Fault] = {}
        """What each Generate ended with that failed, until its call is gone."""
        self._step: asyncio.Task[None] | None = None

    def connect(self, shards: Sequence[BulkServer]) -> None:
        """Give it the shards that let KV in."""
        self._shards = shards

    async def call_allocate(
        self,
        request: decode_pb2.AllocateRequest,
        context: Context,
        objection: Fault | None = None,
    ) -> decode_pb2.AllocateResponse:
        """An Allocate; leaves the queue when the caller stops waiting. `objection` is what
        `grammar_check` has against it."""
        call, answer = self._open_unary()
        self._keys[call] = key_of(request.ref)
        self.spans.allocate(key_of(request.ref), context, self._clock.now())
        self.requests.asked(key_of(request.ref), context, request.request_id)
        self.feed(ev.AllocateCalled(call, request, objection))
        try:
            response = await answer
        except asyncio.CancelledError:
            self.feed(ev.AllocateCallEnded(call))
            raise
        finally:
            del self._unary[call], self._keys[call]
            self.requests.asked_in_vain(key_of(request.ref))
        assert isinstance(response, decode_pb2.AllocateResponse)
        return response

    async def call_first_token(
        self, request: decode_pb2.SendFirstTokenRequest
    ) -> decode_pb2.SendFirstTokenResponse:
        """A SendFirstToken."""
        response = await self._call(lambda call: ev.FirstTokenCalled(call, request))
        assert isinstance(response, decode_pb2.SendFirstTokenResponse)
        return response

    async def call_release(self, request: decode_pb2.ReleaseRequest) -> decode_pb2.ReleaseResponse:
        """A Release."""
        response = await self._call(lambda call: ev.ReleaseCalled(call, request))
        assert isinstance(response, decode_pb2.ReleaseResponse)
        return response

    def open_session(self, hello: decode_pb2.Hello) -> tuple[int, SessionOutbox]:
        """A P's session; the caller reports what comes in and its end."""
        # Twice the largest message: one of that size may leave while others gather.
        outbox = SessionOutbox(2 * self.machine.ledger.config.max_message_bytes)
        stream = next(self._numbers)
        self._sessions[stream] = outbox
        self._session_log.hello(stream, hello.instance.name)
        self.feed(ev.HelloReceived(stream, hello))
        return stream, outbox

    def close_session(self, stream: int) -> None:
        """A session's stream is gone."""
        del self._sessions[stream]
        broke = self.machine.ledger.sessions.of_stream(stream) is not None
        self._session_log.closed(stream, broke)
        self.feed(ev.SessionStreamEnded(stream))

    def open_generate(
        self,
        request: inference_pb2.GenerateRequest,
        budget_s: float,
        context: Context,
        direct: bool = True,
        objection: Fault | None = None,
    ) -> tuple[int, TokenOutbox]:
        """A client's leg, by a router unless it is `direct`; the caller reports its end.
        `objection` is what `grammar_check` has against it."""
        call, outbox = self._open_generate(request, budget_s, context, objection)
        transfer, refused = self.machine.ledger.of_call(call), self._refused.get(call)
        who = context, request.request_id, direct
        if transfer is not None:
            self.requests.called(transfer.key, *who)
        elif refused is not None:
            key = key_of(request.handoff.ref) if request.HasField("handoff") else None
            self.requests.turned_away(key, refused, *who)
        return call, outbox

    def _open_generate(
        self,
        request: inference_pb2.GenerateRequest,
        budget_s: float,
        context: Context,
        objection: Fault | None,
    ) -> tuple[int, TokenOutbox]:
        called = partial(ev.GenerateCalled, request=request, budget_s=budget_s, objection=objection)
        call, outbox = next(self._numbers), TokenOutbox(self.machine.instance.name)
        self._clients[call] = outbox
        ledger = self.machine.ledger
        if request.HasField("handoff"):
            key = key_of(request.handoff.ref)
            self.spans.client(key, call, context, self._clock.now())
            self.feed(called(call))
            if ledger.of_key(key) is None:
                self.spans.forget(key)
            return call, outbox
        self.feed(called(call))
        transfer = ledger.of_call(call)
        if transfer is not None:
            self.spans.client(transfer.key, call, context, transfer.created, local=True)
        return call, outbox

    def wrote(self, call: int, tokens: int) -> None:
        """Tokens have left for a client."""
        self.spans.wrote(call, tokens, self._clock.now())

    def close_generate(self, call: int) -> None:
        """A client's leg is gone; a late word of it changes nothing."""
        del self._clients[call]
        self._refused.pop(call, None)
        self.feed(ev.GenerateCallEnded(call))

    async def on_engine_thread(self, work: Callable[[], None]) -> None:
        """Do something between two steps."""
        await self._engine_thread.run(work)

    async def stop(self) -> None:
        """Wait for the running step, then end the engine thread. The machine is fed no more."""
        while self._step is not None:
            await self._step
        self._driver.stop()
        await self._engine_thread.stop()
        await self.grammar_check.stop()

    async def _call(self, event: Callable[[int], ev.Event]) -> act.UnaryAnswer:
        call, answer = self._open_unary()
        self.feed(event(call))
        try:
            return await answer
        finally:
            del self._unary[call]

    def _open_unary(self) -> tuple[int, UnaryFuture]:
        call, answer = next(self._numbers), self._loop.create_future()
        self._unary[call] = answer
        return call, answer

    def _perform(self, actions: Sequence[act.Action], now: float) -> None:
        for action in actions:
            if isinstance(action, act.Answer):
                self._settle(action.call, action.message)
            elif isinstance(action, act.Refuse):
                self._refuse(action, now)
            elif isinstance(action, act.Emit | act.FinishGenerate):
                self._to_client(action)
            elif isinstance(action, act.SessionSend | act.SessionEnd):
                self._to_session(action)
            elif isinstance(action, act.ToReceiver):
                self._to_bulk(action)
            elif isinstance(action, act.RunStep):
                self._step = self._loop.create_task(self._run_step(action.plan, now))
            elif isinstance(action, act.Changed):
                self._note(action, now)
            elif isinstance(action, act.SetReady):
                self._set_ready(action.ready, action.reason)
            else:
                self.drained.set()
        self._session_log.handled()

    def _hear(self, event: ev.Event, now: float) -> None:
        for listener in self.event_listeners:
            listener(event, now)
        self._session_log.heard(event)

    def _settle(self, call: int, message: act.UnaryAnswer) -> None:
        answer = self._unary.get(call)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _refuse(self, action: act.Refuse, now: float) -> None:
        for listener in self.fault_listeners:
            listener(action.fault)
        if action.call in self._clients:
            self._refused[action.call] = action.fault
            self.spans.turned_away(action.call)
            self._clients[action.call].fail(action.fault)
            return
        key = self._keys.get(action.call)
        if key is not None:
            live = self.machine.ledger.of_key(key)
            if live is None or live.prefill is None:
                self.spans.refused(key, action.fault, now)
        answer = self._unary.get(action.call)
        if answer is not None and not answer.done():
            answer.set_exception(action.fault)

    def _to_client(self, action: act.Emit | act.FinishGenerate) -> None:
        outbox = self._clients.get(action.call)
        if outbox is None:
            return
        if isinstance(action, act.Emit):
            outbox.tokens(action.tokens)
        else:
            outbox.finish(action.reason, action.usage, action.timings)

    def _to_session(self, action: act.SessionSend | act.SessionEnd) -> None:
        outbox = self._sessions.get(action.stream)
        if outbox is None:
            return
        if isinstance(action, act.SessionSend):
            if not outbox.send(action.message):
                self.feed(ev.SessionStreamEnded(action.stream))
        else:
            if action.fault is not None:
                self._session_log.refused(action.stream, action.fault)
            outbox.end(action.fault)

    def _to_bulk(self, action: act.ToReceiver) -> None:
        for shard in self._shards:
            shard.post(action)
        if isinstance(action, act.AdmitSession):
            self._session_log.admitted(action.owner)
        elif isinstance(action, act.DismissPrefill):
            self._session_log.dismissed(action.owner)

    def _note(self, change: act.Changed, now: float) -> None:
        self.requests.changed(change)
        self.spans.changed(change, now)
        if change.after is DecodeState.RESERVED:
            transfer = self.machine.ledger.of_key(change.key)
            if transfer is not None and transfer.receiving:
                carrier = transfer.carrier
                how = transport_label(carrier.transport), carrier.kv_format
                self.spans.carried(change.key, *how)
        for listener in self.listeners:
            listener(change)

    async def _run_step(self, plan: act.StepPlan, now: float) -> None:
        prefilling, decoding = (
            self._of_grants(plan.prefill_grants),
            self._of_grants(plan.decode_grants),
        )
        self.spans.step_began(plan, prefilling, decoding, now)
        event: ev.Event
        fault: Fault | None = None
        try:
            prefilled, decoded = await self._engine_thread.run(lambda: run_plan(self._engine, plan))
            event = ev.StepDone(plan.step, prefilled, decoded)
        except EngineFault as error:
            fault = Fault(Reason.ENGINE_ERROR, str(error))
            event = ev.StepFailed(plan.step, fault)
        self.spans.step_ended(self._clock.now(), fault)
        self._step = None
        self.feed(event)

    def _of_grants(self, grants: Sequence[str]) -> list[TransferKey]:
        transfers = self.machine.ledger.transfers
        return [transfers[grant].key for grant in grants if grant in transfers]


def run_plan(
    engine: Engine, plan: act.StepPlan
) -> tuple[Sequence[Sampled | None], Sequence[Sampled]]:
    """A step, on the engine thread. EngineFault, also when the engine answers for another number of
    chunks or slots."""
    prefilled, decoded = engine.step(plan.prefill, plan.decode, _no_layer)
    if (len(prefilled), len(decoded)) != (len(plan.prefill), len(plan.decode)):
        raise EngineFault(
            f"{len(plan.prefill)} chunks and {len(plan.decode)} slots went in, "
            f"{len(prefilled)} and {len(decoded)} tokens came out"
        )
    return prefilled, decoded


def _no_layer(group: int, layer: int) -> None:
    """Locally computed KV goes nowhere."""
