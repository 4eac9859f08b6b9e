"""A session of P's with the kit's D: what it has said, and what D says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc.aio

from pd_grpc.conformance.case import within
from pd_grpc.conformance.prefill.step import Refusal, end_with
from pd_grpc.v1 import decode_pb2


class Session:
    """One Session call that was welcomed. Heartbeats are acknowledged while `acks` holds."""

    def __init__(
        self, session_id: str, hello: decode_pb2.Hello, knows: Callable[[str], bool]
    ) -> None:
        """`knows` says of a grant_id whether D knows it as this P's."""
        self.session_id = session_id
        self.hello = hello
        self.heartbeats: list[decode_pb2.Heartbeat] = []
        self.goodbye: decode_pb2.Goodbye | None = None
        self.acks = True
        self.over = False
        self._knows = knows
        self._outbox: asyncio.Queue[decode_pb2.SessionResponse | Refusal | None] = asyncio.Queue()
        self._news = asyncio.Event()

    # What a case says

    def say(self, **message: Any) -> None:
        """Send P a message, by the name of its kind."""
        self._outbox.put_nowait(decode_pb2.SessionResponse(**message))

    def say_message(self, message: decode_pb2.SessionResponse) -> None:
        """Send P a message as it is."""
        self._outbox.put_nowait(message)

    def end(self, refusal: Refusal | None = None) -> None:
        """End the call; None is OK."""
        self._outbox.put_nowait(refusal)

    async def heartbeat(
        self, what: str, number: int = 1, seconds: float | None = None
    ) -> decode_pb2.Heartbeat:
        """The `number`-th heartbeat, from 1."""
        await self._until(lambda: len(self.heartbeats) >= number, what, seconds)
        return self.heartbeats[number - 1]

    async def lists(
        self, grant_ids: Iterable[str], what: str, seconds: float | None = None
    ) -> None:
        """A heartbeat to come, or the last one, lists exactly these grants."""
        wanted = sorted(grant_ids)

        def listed() -> bool:
            return bool(self.heartbeats) and sorted(self.heartbeats[-1].grant_ids) == wanted

        await self._until(listed, what, seconds)

    async def ended(self, what: str, seconds: float | None = None) -> None:
        """The call is over."""
        await self._until(lambda: self.over, what, seconds)

    # What D does

    async def serve(
        self,
        requests: AsyncIterator[decode_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Converse to the end."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                message = await self._outbox.get()
                if message is None:
                    return
                if not isinstance(message, decode_pb2.SessionResponse):
                    await end_with(context, message)
                await context.write(message)
        finally:
            reader.cancel()
            self.over = True
            self._news.set()

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionRequest]) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "heartbeat":
                self._heard(message.heartbeat)
            elif kind == "goodbye":
                self.goodbye = message.goodbye
                self._outbox.put_nowait(None)
            self._news.set()
        self._outbox.put_nowait(None)

    def _heard(self, heartbeat: decode_pb2.Heartbeat) -> None:
        self.heartbeats.append(heartbeat)
        if self.acks:
            unknown = [g for g in heartbeat.grant_ids if not self._knows(g)]
            ack = decode_pb2.HeartbeatAck(sequence=heartbeat.sequence, unknown_grant_ids=unknown)
            self.say(heartbeat_ack=ack)

    async def _until(self, holds: Callable[[], bool], what: str, seconds: float | None) -> None:
        async def wait() -> None:
            while not holds():
                self._news.clear()
                await self._news.wait()

        await within(seconds, wait(), what)
