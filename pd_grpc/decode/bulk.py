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

import grpc.aio
from google.protobuf.message import DecodeError

from pd_grpc.decode import events as ev
from pd_grpc.decode.receiver import Action, EndStream, Receiver, Respond
from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.serving import HandlerRegistry
from pd_grpc.v1 import transfer_pb2, transfer_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class BulkServer(transfer_pb2_grpc.TransferServiceServicer):
    """The shard of a D. `listeners` are called on the bulk thread with events for D's machine."""

    def __init__(self, config: DecodeConfig, receiver: Receiver, clock: Clock) -> None:
        self.listeners: list[Callable[[ev.Event], None]] = []
        self._config = config
        self._receiver = receiver
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pd-bulk", daemon=True)
        self._outboxes: dict[int, asyncio.Queue[Action]] = {}
        self._numbers = count(1)
        self._wake: asyncio.TimerHandle | None = None
        self._server: grpc.aio.Server | None = None
        self._handlers = HandlerRegistry()
        self.port = 0

    @property
    def endpoint(self) -> str:
        """host:port that P reaches it at."""
        return self._config.bulk_advertise or rpc.address(self._config.host, self.port)

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

    def open_grant(self, grant_id: str, key: TransferKey, blocks: tuple[int, ...], n: int) -> None:
        """Let KV in for a grant; from any thread."""

        def act() -> None:
            self._perform(self._receiver.open_grant(grant_id, key, blocks, n))

        self._loop.call_soon_threadsafe(act)

    def close_grant(self, grant_id: str, fault: Fault) -> None:
        """Let no more in for a grant; from any thread."""

        def act() -> None:
            self._perform(self._receiver.close_grant(grant_id, fault))

        self._loop.call_soon_threadsafe(act)

    async def Transfer(self, request_iterator: Any, context: Context) -> None:
        """One stream of chunks in and acks out."""
        stream = next(self._numbers)
        outbox: asyncio.Queue[Action] = asyncio.Queue()
        self._outboxes[stream] = outbox
        self._receiver.stream_began(stream)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        # However the reading ends, the writing ends after it.
        reader.add_done_callback(lambda _: outbox.put_nowait(EndStream(stream, None)))
        try:
            await self._write(outbox, context)
        finally:
            del self._outboxes[stream]
            reader.cancel()
            await asyncio.wait([reader])
            self._receiver.stream_ended(stream)

    async def _read(self, stream: int, requests: Any) -> None:
        message: transfer_pb2.TransferRequest
        try:
            async for message in requests:
                self._perform(self._receiver.message(stream, message, self._clock.now()))
        except DecodeError:
            self._perform(self._receiver.garbled(stream))

    async def _write(self, outbox: asyncio.Queue[Action], context: Context) -> None:
        while True:
            action = await outbox.get()
            if isinstance(action, Respond):
                await context.write(action.message)
            elif isinstance(action, EndStream):
                if action.fault is not None:
                    await rpc.abort(context, action.fault)
                return

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Respond | EndStream):
                outbox = self._outboxes.get(action.stream)
                if outbox is not None:
                    outbox.put_nowait(action)
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
        self._server = grpc.aio.server(
            interceptors=[self._handlers], options=rpc.server_options(self._config)
        )
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, self._server)
        self.port = rpc.bind(self._server, self._config.host, self._config.bulk_port)
        await self._server.start()

    async def _stop(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        if self._server is not None:
            await self._server.stop(0)
        await self._handlers.drained()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
