"""One thing that P asks of the kit's D: what came, and how it is answered. Well, unless a case
says otherwise."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from pd_grpc.conformance.case import within
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, TransportFault

M = TypeVar("M", bound=Message)

Refusal: TypeAlias = Fault | TransportFault | Message
"""A fault of the protocol's, a bare status, or a google.rpc.Status of a case's own."""


class Refused(Exception):
    """The call ends with this."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Step(Generic[M]):
    """A step of the conversation, in which P speaks first."""

    def __init__(self, name: str, transcript: Transcript) -> None:
        self.seen: list[M] = []
        """Everything that came, in order."""
        self.left = 0
        """Calls that P ended before they were answered."""
        self.answer: dict[str, Any] = {}
        """Fields of D's answer that replace its own."""
        self._name = name
        self._transcript = transcript
        self._refusals: deque[Refusal | None] = deque()
        self._may_go = asyncio.Event()
        self._may_go.set()
        self._news = asyncio.Event()

    # What a case says

    def refuse(self, *refusals: Refusal | None) -> None:
        """Refuse the next ones, each with its own; None takes one well."""
        self._refusals.extend(refusals)

    def hold(self) -> None:
        """Answer nothing until `go`."""
        self._may_go.clear()

    def go(self) -> None:
        """Answer all that waits, and what comes."""
        self._may_go.set()

    async def came(self, what: str, number: int = 1, seconds: float | None = None) -> M:
        """The `number`-th that P has sent, from 1."""
        await self._until(lambda: len(self.seen) >= number, what, seconds)
        return self.seen[number - 1]

    async def was_left(self, what: str, number: int = 1, seconds: float | None = None) -> None:
        """P has ended so many calls before they were answered."""
        await self._until(lambda: self.left >= number, what, seconds)

    # What D does

    async def take(self, message: M) -> None:
        """Note what came; returns when it may be answered. Refused when it must not be."""
        self.seen.append(message)
        self._news.set()
        await self.waits(self._may_go.wait())
        refusal = self._refusals.popleft() if self._refusals else None
        if refusal is not None:
            self._transcript.sent(self._name, f"refused: {refusal}")
            raise Refused(refusal)

    async def waits(self, awaitable: Awaitable[Any]) -> None:
        """Wait for something while P may end the call."""
        try:
            await awaitable
        except asyncio.CancelledError:
            self.left += 1
            self._transcript.received(self._name, "cancelled")
            self._news.set()
            raise

    async def _until(self, holds: Any, what: str, seconds: float | None) -> None:
        async def wait() -> None:
            while not holds():
                self._news.clear()
                await self._news.wait()

        await within(seconds, wait(), what)


@contextlib.asynccontextmanager
async def refusing(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call as `Refused` has it."""
    try:
        yield
    except Refused as refused:
        await end_with(context, refused.refusal)


async def end_with(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal) -> NoReturn:
    """End a call with a refusal."""
    if isinstance(refusal, Fault):
        await rpc.abort(context, refusal)
    if isinstance(refusal, Message):
        await rpc.abort_with(context, refusal)
    await context.abort(rpc.grpc_code(refusal.code), refusal.message)
    raise AssertionError("abort returns never")
