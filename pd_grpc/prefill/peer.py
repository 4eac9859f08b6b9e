"""The calls of P to one D: the session, Allocate as futures, the first token, Release."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.interception import Guard, Wire
from pd_grpc.protocol.messages import INLINE
from pd_grpc.protocol.posting import post
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import Unreachable
from pd_grpc.v1 import decode_pb2, decode_pb2_grpc

Feed = Callable[[ev.Event], None]
Metadata = Sequence[tuple[str, str]]

Reach = Callable[[str, decode_pb2.Welcome], Awaitable[None]]
"""Gets ready to send KV to the D at an endpoint as its welcome says. Unreachable when that cannot
be."""


async def inline_alone(endpoint: str, welcome: decode_pb2.Welcome) -> None:
    """For a P that has only the transport that goes wherever gRPC goes."""
    if welcome.transport not in INLINE:
        raise Unreachable("this prefill sends KV inline alone")


FAREWELL_S = 1.0
"""How long D may take to end a session that we have said goodbye on."""


class SessionStream:
    """One Session call. What D says, and the end, are fed as events until it is closed."""

    def __init__(
        self,
        stub: decode_pb2_grpc.DecodeServiceStub,
        opened: act.OpenSession,
        feed: Feed,
        reach: Reach,
    ) -> None:
        self._stub = stub
        self._reach = reach
        self._opened = opened
        self._feed = feed
        self._closed = False
        self._outbox: asyncio.Queue[decode_pb2.SessionRequest | None] = asyncio.Queue()
        self._outbox.put_nowait(decode_pb2.SessionRequest(hello=opened.hello))
        self.task = asyncio.create_task(self._converse(), name="pd-session")

    def send(self, message: decode_pb2.SessionRequest) -> None:
        """Queue a message."""
        self._outbox.put_nowait(message)

    def close(self, graceful: bool) -> None:
        """End the call; nothing of it is fed any more."""
        self._closed = True
        if graceful:
            self._outbox.put_nowait(None)
            asyncio.get_running_loop().call_later(FAREWELL_S, self.task.cancel)
        else:
            self.task.cancel()

    async def _converse(self) -> None:
        call = self._stub.Session()
        writer = asyncio.create_task(self._write(call))
        fault = None
        try:
            async for message in call:
                if not await self._gets_there(message):
                    return
                self._tell(ev.SessionMessage(self._opened.endpoint, self._opened.link, message))
        except grpc.aio.AioRpcError as error:
            fault = rpc.read_error(error)
        finally:
            # Whatever ended the reading, nobody listens any more: the session is broken.
            writer.cancel()
            call.cancel()
            self._tell(ev.SessionBroken(self._opened.endpoint, self._opened.link, fault))

    async def _gets_there(self, message: decode_pb2.SessionResponse) -> bool:
        """Whether a message may be heard: a welcome only when its transport gets us to D."""
        if message.WhichOneof("message") != "welcome":
            return True
        endpoint, link = self._opened.endpoint, self._opened.link
        try:
            await self._reach(endpoint, message.welcome)
        except Unreachable as error:
            transport = message.welcome.transport
            self._tell(ev.TransportFailed(endpoint, link, transport, str(error)))
            return False
        return True

    async def _write(self, call: Any) -> None:
        # Why a write fails is the reader's to tell.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()

    def _tell(self, event: ev.Event) -> None:
        if not self._closed:
            self._feed(event)


@dataclass
class _Connection:
    """A channel for Allocate futures; a new session gets a new one, for an old one may be in its
    back-off still."""

    link: int
    channel: grpc.Channel
    stub: decode_pb2_grpc.DecodeServiceStub
    in_flight: int = 0


class DecodePeer:
    """Everything that reaches one D. To be used on the control loop; events are fed there."""

    def __init__(
        self,
        endpoint: str,
        config: PrefillConfig,
        feed: Feed,
        wire: Wire | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._config = config
        self._feed = feed
        self.reach: Reach = inline_alone
        self._wire = wire or Wire()
        self._loop = asyncio.get_running_loop()
        self._channel = self._wire.aio_channel(endpoint, config, config)
        self._stub = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self._sessions: dict[int, SessionStream] = {}
        self._connection: _Connection | None = None
        self._allocates: dict[tuple[TransferKey, int], grpc.Future[Any]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def open_session(self, opened: act.OpenSession) -> None:
        """Open a session stream."""
        stream = SessionStream(self._stub, opened, self._feed, self.reach)
        self._sessions[opened.link] = stream
        stream.task.add_done_callback(lambda _: self._sessions.pop(opened.link, None))

    def send(self, message: act.SendOnSession) -> None:
        """Say something on a session."""
        stream = self._sessions.get(message.link)
        if stream is not None:
            stream.send(message.message)

    def close_session(self, closed: act.CloseSession) -> None:
        """End a session's stream."""
        stream = self._sessions.get(closed.link)
        if stream is not None:
            stream.close(closed.graceful)

    def allocate(self, asked: act.SendAllocate, metadata: Metadata) -> None:
        """Ask for blocks: a future, whose callback comes on a thread of grpc's."""
        with Guard(self._wire.log) as guard:
            connection = self._connect(asked.link)
            future = connection.stub.Allocate.future(
                asked.request, timeout=asked.timeout_s, metadata=tuple(metadata)
            )
        if guard.fault is not None:
            self._feed(ev.AllocateAnswered(asked, None, guard.fault))
            return
        connection.in_flight += 1
        self._allocates[asked.key, asked.ask] = future

        def done(ended: grpc.Future[Any]) -> None:
            post(self._loop, self._allocated, asked, connection, ended)

        future.add_done_callback(done)

    def cancel_allocate(self, cancelled: act.CancelAllocate) -> None:
        """Stop asking."""
        future = self._allocates.pop((cancelled.key, cancelled.ask), None)
        if future is not None:
            future.cancel()

    def send_first_token(self, sent: act.SendFirstToken, metadata: Metadata) -> None:
        """Hand over the first token."""
        self._spawn(self._send_first_token(sent, metadata))

    def release(self, release: act.SendRelease, metadata: Metadata) -> None:
        """Give a transfer back."""
        self._spawn(self._release(release, metadata))

    async def calls_done(self) -> None:
        """Wait until D has answered every SendFirstToken and Release, or their time is over."""
        while self._calls:
            await asyncio.wait(list(self._calls))

    async def close(self) -> None:
        """Let calls under way end, then close the connections."""
        for future in list(self._allocates.values()):
            future.cancel()
        for stream in self._sessions.values():
            stream.close(graceful=True)
        tasks = [*self._calls, *(stream.task for stream in self._sessions.values())]
        if tasks:
            await asyncio.wait(tasks)
        await self._channel.close(None)
        if self._connection is not None:
            self._connection.channel.close()
            self._connection = None

    def _connect(self, link: int) -> _Connection:
        if self._connection is None or self._connection.link != link:
            old = self._connection
            channel = self._wire.sync_channel(self._endpoint, self._config, self._config)
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            self._connection = _Connection(link, channel, stub)
            if old is not None and not old.in_flight:
                old.channel.close()
        return self._connection

    def _allocated(
        self, asked: act.SendAllocate, connection: _Connection, ended: grpc.Future[Any]
    ) -> None:
        connection.in_flight -= 1
        if connection is not self._connection and not connection.in_flight:
            connection.channel.close()
        self._allocates.pop((asked.key, asked.ask), None)
        answer = None
        try:
            with Guard(self._wire.log) as guard:
                answer = ended.result()
        except grpc.FutureCancelledError:
            return
        self._feed(ev.AllocateAnswered(asked, answer, guard.fault))

    async def _send_first_token(self, sent: act.SendFirstToken, metadata: Metadata) -> None:
        state = None
        with Guard(self._wire.log) as guard:
            answer = await self._stub.SendFirstToken(
                sent.request, timeout=sent.timeout_s, metadata=tuple(metadata)
            )
            state = answer.state
        self._feed(ev.FirstTokenAnswered(sent.key, sent.attempt, state, guard.fault))

    async def _release(self, sent: act.SendRelease, metadata: Metadata) -> None:
        with Guard(self._wire.log) as guard:
            await self._stub.Release(sent.request, timeout=sent.timeout_s, metadata=tuple(metadata))
        self._feed(ev.ReleaseAnswered(sent, guard.fault))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


PeerFactory = Callable[[str, PrefillConfig, Feed], DecodePeer]
"""Makes what reaches the D at an endpoint; events are fed to the third."""
