"""D's bulk side: `TransferService` on an endpoint, a thread and an event loop of its own.

KV chunks never share a loop with control messages, which would wait behind them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pd_grpc.decode import actions as act
from pd_grpc.decode import events as ev
from pd_grpc.decode.receiver import Action, EndStream, Receiver, Respond
from pd_grpc.decode.transfer import Owner
from pd_grpc.decode.transfer_outbox import TransferOutbox
from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, bad_request
from pd_grpc.protocol.interception import Wire
from pd_grpc.protocol.niceness import stand_back
from pd_grpc.protocol.posting import post
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.protocol.serving import HandlerRegistry
from pd_grpc.protocol.unforeseen import defect
from pd_grpc.telemetry.log_events import Event
from pd_grpc.transport.base import ReceiveTransport
from pd_grpc.transport.chunk_codec import SERVICE, IncomingRequest, parse_request
from pd_grpc.v1 import transfer_pb2

Context = grpc.aio.ServicerContext[Any, Any]

FRAME_BYTES = 256 << 10
"""The longest frame that P may send: each costs either end, by default there are 64 in a MiB. One
holds up what else is on the connection, at 1 Gbit/s for 2 ms."""

ACKS_PER_WINDOW = 2
"""Of a sender that uses its window: each ack costs either end, and too few would let it run dry."""


class BulkServer:
    """One shard of a D. `listeners` are called on its thread with events for D's machine."""

    def __init__(
        self,
        config: DecodeConfig,
        receiver: Receiver,
        clock: Clock,
        wire: Wire | None = None,
        transports: Iterable[ReceiveTransport] = (),
        shard: int = 0,
    ) -> None:
        """`transports` are those of `receiver`, to be started and stopped; `shard` is the index of
        this one."""
        self.listeners: list[Callable[[ev.Event], None]] = []
        self._config = config
        self._shard = shard
        self._receiver = receiver
        self._clock = clock
        self._transports = tuple(transports)
        self._loop = asyncio.new_event_loop()
        name = f"pd-bulk-{shard}" if shard else "pd-bulk"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._outboxes: dict[int, TransferOutbox] = {}
        self._numbers = count(1)
        self._wake: asyncio.TimerHandle | None = None
        self._server: grpc.aio.Server | None = None
        self._wire = wire or Wire()
        self._handlers = HandlerRegistry(self._wire)
        self._interceptors = self._wire.around(self._handlers)
        self.port = 0

    @property
    def endpoint(self) -> str:
        """host:port that P reaches it at."""
        told = self._config.bulk_advertise
        return told[self._shard] if told else rpc.address(self._config.host, self.port)

    def start(self) -> None:
        """Bind and serve. PortInUse when the port is taken."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        except rpc.PortInUse:
            self._end_thread()
            raise

    def stop(self) -> None:
        """End every stream and the thread. Blocks until the last handler has cleaned up."""
        done: Future[None] = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        done.result()
        self._end_thread()

    def post(self, action: act.ToReceiver) -> None:
        """Say what may come, in order; from any thread."""
        post(self._loop, self._take, action)

    async def Transfer(self, request_iterator: Any, context: Context) -> None:
        """One stream of chunks in and acks out."""
        stream = next(self._numbers)
        outbox = TransferOutbox(self._config.send_window_bytes // ACKS_PER_WINDOW)
        self._outboxes[stream] = outbox
        self._receiver.stream_began(stream)
        reader = asyncio.create_task(self._read(stream, request_iterator, outbox))
        # However the reading ends, the writing ends after it.
        reader.add_done_callback(lambda done: self._reading_ended(stream, outbox, done))
        try:
            await self._write(stream, outbox, context)
        except Fault as fault:
            # First, for to a reader an abort of ours looks like a failure.
            reader.cancel()
            await asyncio.wait([reader])
            await rpc.abort(context, fault)
        finally:
            del self._outboxes[stream]
            reader.cancel()
            await asyncio.wait([reader])
            self._receiver.stream_ended(stream)

    async def _read(self, stream: int, requests: Any, outbox: TransferOutbox) -> None:
        message: IncomingRequest
        try:
            async for message in requests:
                self._perform(self._receiver.message(stream, message, self._clock.now()))
                await outbox.room()
        except DecodeError:
            fault = bad_request([FieldError("message", "is no protobuf")])
            self._perform(self._receiver.unreadable(stream, fault))

    def _reading_ended(self, stream: int, outbox: TransferOutbox, done: asyncio.Task[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._wire.log.note(Event.DEFECT, "taking KV in failed", error=error)
            fault = defect(error, "taking KV in failed")
            self._perform(self._receiver.unreadable(stream, fault))
        outbox.end(None)

    async def _write(self, stream: int, outbox: TransferOutbox, context: Context) -> None:
        while (message := await outbox.next()) is not None:
            if message.HasField("ack"):
                self._receiver.acknowledged(stream, message.ack.accepted_bytes)
            await rpc.write(context, message)

    def _take(self, action: act.ToReceiver) -> None:
        receiver = self._receiver
        if isinstance(action, act.OpenReceive):
            grant = action.grant_id, action.key, action.owner, action.blocks, action.wanted
            how = action.transport, action.senders, action.kv_format
            self._perform(receiver.open_grant(*grant, *how))
        elif isinstance(action, act.CloseReceive):
            self._perform(receiver.close_grant(action.grant_id, action.fault, self._clock.now()))
        elif isinstance(action, act.AdmitSession):
            receiver.sessions.admit(action.owner, action.session_id)
        else:
            receiver.sessions.dismiss(action.owner)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Respond):
                outbox = self._outboxes.get(action.stream)
                if outbox is not None:
                    outbox.send(action.message)
            elif isinstance(action, EndStream):
                outbox = self._outboxes.get(action.stream)
                if outbox is not None:
                    outbox.end(action.fault)
            else:
                for listener in self.listeners:
                    listener(action)
        self._rearm()

    def _rearm(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        at = self._receiver.next_wake()
        if at is not None:
            delay = max(0.0, at - self._clock.now())
            self._wake = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._wake = None
        self._perform(self._receiver.tick(self._clock.now()))

    async def _serve(self) -> None:
        options = [*rpc.server_options(self._config), ("grpc.http2.max_frame_size", FRAME_BYTES)]
        self._server = grpc.aio.server(interceptors=self._interceptors, options=options)
        # As the generated code does it, but for what reads a request.
        transfer = grpc.stream_stream_rpc_method_handler(
            self.Transfer,
            request_deserializer=parse_request,
            response_serializer=transfer_pb2.TransferResponse.SerializeToString,
        )
        methods = {"Transfer": transfer}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, methods),)
        )
        port = self._config.bulk_port
        self.port = rpc.bind(self._server, self._config.host, port + self._shard if port else 0)
        await self._server.start()
        for transport in self._transports:
            await transport.start(self._writer)
        # Not before: what grpc starts serves the control endpoint too, and would be as nice.
        stand_back(self._config.bulk_nice)

    def _writer(self, name: str, epoch: int, writes: bool) -> None:
        """A process of P can write to the pool itself from now on, or cannot any more."""
        owner = Owner(name, epoch)
        event = ev.WriterAttached(owner) if writes else ev.WriterGone(owner)
        for listener in self.listeners:
            listener(event)

    async def _stop(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        if self._server is not None:
            await self._server.stop(0)
        await self._handlers.drained()
        for transport in self._transports:
            await transport.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
