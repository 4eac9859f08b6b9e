"""The shell around P's machine: it feeds events on the control loop and carries actions out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from opentelemetry.context import Context

from pd_grpc.engine.base import Engine, EngineFault, Sampled
from pd_grpc.engine.grammar_check import GrammarCheck
from pd_grpc.engine.thread import EngineThread
from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.bulk import BulkSender
from pd_grpc.prefill.link_log import LinkLog
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.peer import DecodePeer, PeerFactory
from pd_grpc.prefill.spans import PrefillSpans
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.driver import Driver
from pd_grpc.protocol.failures import FailureLog
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import INLINE
from pd_grpc.protocol.refs import key_of
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.transport.base import Unreachable
from pd_grpc.v1 import decode_pb2, prefill_pb2


class CallOutbox:
    """What a Prefill call is to be sent, in order, and its end."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[prefill_pb2.PrefillResponse | Fault | None] = asyncio.Queue()

    def put(self, item: prefill_pb2.PrefillResponse | Fault | None) -> None:
        """A message, the fault that ends the call, or None for its end with OK."""
        self._queue.put_nowait(item)

    async def next(self) -> prefill_pb2.PrefillResponse | None:
        """The next message; None at the end. Raises the fault that ends the call."""
        item = await self._queue.get()
        if isinstance(item, Fault):
            raise item
        return item


@dataclass
class Caller:
    """Who called Prefill and for what, as the line of its failure needs it."""

    request: prefill_pb2.PrefillRequest
    context: Context
    direct: bool
    noted: bool = False
    """Whether the end of its request has been."""


class PrefillRuntime:
    """Runs a machine on the loop that makes it. `listeners` hear of every change of state."""

    def __init__(
        self,
        machine: PrefillMachine,
        engine: Engine,
        config: PrefillConfig,
        clock: Clock,
        spans: PrefillSpans,
        set_ready: Callable[[bool, str], None],
        log: InstanceLog,
        peers: PeerFactory = DecodePeer,
    ) -> None:
        """`peers` makes what reaches one D."""
        self.machine = machine
        self.drained = asyncio.Event()
        self.listeners: list[Callable[[act.Changed], None]] = []
        self.event_listeners: list[Callable[[ev.Event, float], None]] = []
        """Of every event, with its time, before it is handled."""
        self.fault_listeners: list[Callable[[Fault], None]] = []
        """Of every Prefill that ends with a fault."""
        self._engine = engine
        self._config = config
        self._clock = clock
        self._spans = spans
        self._set_ready = set_ready
        self._make_peer = peers
        self._loop = asyncio.get_running_loop()
        self._failures = FailureLog(log)
        self._links = LinkLog(log, machine.placement.pool)
        self._engine_thread = EngineThread(log)
        self.grammar_check = GrammarCheck(engine.grammars)
        self._driver: Driver[ev.Event, act.Action] = Driver(
            machine, clock, self._perform, before=self._trace
        )
        self.feed = self._driver.feed
        self.feed_from_thread = self._driver.feed_from_thread
        self.wake = self._driver.wake
        self._bulk: BulkSender | None = None
        self._numbers = count(1)
        self._calls: dict[int, CallOutbox] = {}
        self.callers: dict[int, Caller] = {}
        self._peers: dict[str, DecodePeer] = {}
        self._shards: dict[str, set[str]] = {}
        self._reached: dict[str, int] = {}
        """The process, by its epoch, of the D at each endpoint that was reached last."""
        self._closing: set[asyncio.Task[None]] = set()
        self._step: asyncio.Task[None] | None = None
        self._stopped = False

    def connect(self, bulk: BulkSender) -> None:
        """Give it the bulk side."""
        self._bulk = bulk

    # --- what comes in -------------------------------------------------------------------------

    def open_call(
        self,
        request: prefill_pb2.PrefillRequest,
        budget_s: float,
        context: Context,
        direct: bool = True,
        objection: Fault | None = None,
    ) -> tuple[int, CallOutbox]:
        """A Prefill call, of a router unless it is `direct`; the caller reports its end.
        `objection` is what `grammar_check` has against it."""
        call, outbox = next(self._numbers), CallOutbox()
        self._calls[call] = outbox
        self.callers[call] = Caller(request, context, direct)
        event = ev.PrefillCalled(call, request, budget_s, objection)
        self._spans.called(event, context)
        self.feed(event)
        return call, outbox

    def close_call(self, call: int) -> None:
        """A Prefill call is gone; after its end that changes nothing."""
        del self._calls[call]
        self.feed(ev.PrefillCallEnded(call))
        del self.callers[call]

    async def on_engine_thread(self, work: Callable[[], None]) -> None:
        """Do something between two steps."""
        await self._engine_thread.run(work)

    async def leave(self) -> None:
        """Say goodbye to every D once it has heard of every release. Nothing is in flight."""
        if self._step is not None:
            await self._step
        for peer in list(self._peers.values()):
            await peer.calls_done()
        now = self._clock.now()
        self._perform(self.machine.leave(now), now)

    async def stop(self) -> None:
        """Close what reaches the Ds, and end the engine thread. The machine is fed no more."""
        self._stopped = True
        self._driver.stop()
        await self._engine_thread.stop()
        await self.grammar_check.stop()
        for endpoint in list(self._peers):
            self._forget(endpoint)
        while self._closing:
            await asyncio.wait(list(self._closing))

    # --- what goes out -------------------------------------------------------------------------

    def _perform(self, actions: Sequence[act.Action], now: float) -> None:
        for action in actions:
            if isinstance(action, act.Emit | act.FinishCall | act.FailCall):
                self._to_caller(action, now)
            elif isinstance(action, act.OpenSession | act.SendOnSession | act.CloseSession):
                self._to_session(action)
            elif isinstance(action, act.SendAllocate):
                metadata = self._spans.allocate(action, now)
                self._peer(action.endpoint).allocate(action, metadata)
            elif isinstance(action, act.CancelAllocate):
                if (peer := self._peers.get(action.endpoint)) is not None:
                    peer.cancel_allocate(action)
            elif isinstance(action, act.SendFirstToken):
                metadata = self._spans.first_token(action, now)
                self._peer(action.endpoint).send_first_token(action, metadata)
            elif isinstance(action, act.SendRelease):
                self._release(action)
            elif isinstance(action, act.ForgetDecode):
                self._forget(action.endpoint)
            elif isinstance(action, act.OpenTransfer | act.CloseTransfer):
                self._to_bulk(action, now)
            elif isinstance(action, act.RunStep):
                self._step = self._loop.create_task(self._run_step(action, now))
            elif isinstance(action, act.Changed):
                self._note(action, now)
            else:
                self._note_health(action)
        self._links.look(now)

    def _to_caller(self, action: act.Emit | act.FinishCall | act.FailCall, now: float) -> None:
        if isinstance(action, act.FailCall):
            self._spans.refused(action.call, action.fault, now)
            for listener in self.fault_listeners:
                listener(action.fault)
            self._note_failure(action.call, action.fault)
        outbox = self._calls.get(action.call)
        if outbox is None:
            return
        if isinstance(action, act.Emit):
            outbox.put(action.response)
        else:
            outbox.put(action.fault if isinstance(action, act.FailCall) else None)

    def _to_session(self, action: act.OpenSession | act.SendOnSession | act.CloseSession) -> None:
        peer = self._peer(action.endpoint)
        if isinstance(action, act.OpenSession):
            peer.open_session(action)
        elif isinstance(action, act.SendOnSession):
            peer.send(action)
        else:
            peer.close_session(action)

    def _to_bulk(self, action: act.OpenTransfer | act.CloseTransfer, now: float) -> None:
        assert self._bulk is not None
        if isinstance(action, act.OpenTransfer):
            self._shards.setdefault(action.decode, set()).add(action.endpoint)
            self._bulk.open(action, self._spans.transfer(action, now))
        else:
            self._bulk.close(action.key, action.strand)

    def _note(self, change: act.Changed, now: float) -> None:
        self._spans.changed(change, now)
        for listener in self.listeners:
            listener(change)
        if change.fault is not None:
            self._note_failure(change.call, change.fault)

    def _note_failure(self, call: int, fault: Fault) -> None:
        """Once: of a request that was taken in at its change of state, else at the call's end."""
        caller = self.callers.get(call)
        if caller is None or caller.noted:
            return
        caller.noted = True
        self._failures.note(
            fault,
            direct=caller.direct,
            context=caller.context,
            key=key_of(caller.request.ref),
            request_id=caller.request.request_id,
        )

    def _note_health(
        self,
        action: act.EngineStuck
        | act.EngineAlive
        | act.SenderStuck
        | act.SenderAlive
        | act.Superseded
        | act.Drained,
    ) -> None:
        if isinstance(action, act.Drained):
            self.drained.set()
        elif isinstance(action, act.EngineAlive | act.SenderAlive):
            if not self.machine.draining and self.machine.stuck is None:
                self._set_ready(True, "")
        else:
            self._set_ready(False, action.fault.message)

    def _peer(self, endpoint: str) -> DecodePeer:
        peer = self._peers.get(endpoint)
        if peer is None:
            peer = self._peers[endpoint] = self._make_peer(endpoint, self._config, self._hear)
            peer.reach = self._reach
        return peer

    async def _reach(self, endpoint: str, welcome: decode_pb2.Welcome) -> None:
        """Get ready to send KV to the shards of a D, where it does not go with the calls anyway."""
        epoch = welcome.instance.epoch
        if self._reached.setdefault(endpoint, epoch) != epoch:
            # Another process has other memory, and may have its shards elsewhere.
            self._reached[endpoint] = epoch
            self._forget_shards(endpoint)
        if welcome.transport in INLINE:
            return
        assert self._bulk is not None
        shards = self._shards.setdefault(endpoint, set())
        shards.update(shard.endpoint for shard in welcome.shards)
        try:
            # A bulk side that is stuck is told of by itself, and is no fault of this D's.
            await asyncio.wait_for(self._bulk.reach(welcome), self._config.connect_s / 2)
        except asyncio.TimeoutError:
            raise Unreachable("the KV sender did not get ready in time") from None

    def _hear(self, event: ev.Event) -> None:
        if not self._stopped:
            self.feed(event)

    def _release(self, release: act.SendRelease) -> None:
        peer, metadata = self._peers.get(release.endpoint), self._spans.release(release)
        if peer is None:
            # P has nothing else to do with this D any more: a connection for this call alone.
            peer = self._make_peer(release.endpoint, self._config, self._hear)
            peer.release(release, metadata)
            self._close(peer)
        else:
            peer.release(release, metadata)

    def _forget(self, endpoint: str) -> None:
        """Close what reaches a D, once what is under way there has ended."""
        self._links.forget(endpoint)
        peer = self._peers.pop(endpoint, None)
        if peer is not None:
            self._close(peer)
        self._reached.pop(endpoint, None)
        self._forget_shards(endpoint)

    def _forget_shards(self, endpoint: str) -> None:
        assert self._bulk is not None
        for shard in self._shards.pop(endpoint, ()):
            # The same D may be reached by another address as well.
            if not any(shard in others for others in self._shards.values()):
                self._bulk.forget(shard)

    def _close(self, peer: DecodePeer) -> None:
        task = self._loop.create_task(peer.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # --- the engine ----------------------------------------------------------------------------

    async def _run_step(self, run: act.RunStep, now: float) -> None:
        self._spans.step_began(run, now)
        event: ev.Event
        fault: Fault | None = None
        try:
            results = await self._engine_thread.run(lambda: self._compute(run))
            event = ev.StepDone(run.step, results)
        except EngineFault as error:
            fault = Fault(Reason.ENGINE_ERROR, str(error))
            event = ev.StepFailed(run.step, str(error))
        self._spans.step_ended(run, self._clock.now(), fault)
        self._step = None
        self.feed(event)

    def _compute(self, run: act.RunStep) -> list[Sampled | None]:
        """One step, on the engine thread; each layer is sent while the next one is computed."""
        bulk = self._bulk
        assert bulk is not None
        computed = [
            (key, chunk.start + len(chunk.token_ids))
            for key, chunk in zip(run.keys, run.chunks, strict=True)
        ]
        return self._engine.prefill(
            run.chunks, lambda group, layer: bulk.layer_ready(computed, group, layer)
        )

    # --- spans ---------------------------------------------------------------------------------

    def _trace(self, event: ev.Event, now: float) -> None:
        for listener in self.event_listeners:
            listener(event, now)
        self._links.heard(event)
        if isinstance(event, ev.AllocateAnswered):
            self._spans.allocated(event, now)
        elif isinstance(event, ev.KvAcked):
            self._spans.acked(event, now)
        elif isinstance(event, ev.TransferCompleted):
            self._spans.sent(event, now)
        elif isinstance(event, ev.FirstTokenAnswered):
            self._spans.first_token_answered(event, now)
