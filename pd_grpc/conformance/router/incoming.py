"""A call that the router makes to an instance of the kit's."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from pd_grpc.conformance.case import Broken, answer_s
from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import DOMAIN, Code, Fault

R = TypeVar("R", bound=Message)

_NO_DEADLINE_S = 1e9
"""grpc reports about 9e18 s for a call without a deadline."""


class IncomingCall(Generic[R]):
    """A stream call of the router's, answered by a case message by message.

    `time_left` is the time to its deadline when it came, in seconds; None without one.
    """

    def __init__(self, instance: str, request: R, time_left: float | None) -> None:
        self.instance = instance
        self.request = request
        self.time_left = None if time_left is None or time_left > _NO_DEADLINE_S else time_left
        self.was_cancelled = False
        self._orders: asyncio.Queue[Message | Fault | grpc.StatusCode] = asyncio.Queue()
        self._over = asyncio.Event()

    def send(self, *messages: Message) -> None:
        """Answer with messages."""
        for message in messages:
            self._orders.put_nowait(message)

    def end(self) -> None:
        """End the answer with OK, once what was sent before has gone out."""
        self._orders.put_nowait(grpc.StatusCode.OK)

    def fail(self, fault: Fault) -> None:
        """End it with a fault of the protocol's."""
        self._orders.put_nowait(fault)

    def fail_bare(self, code: grpc.StatusCode) -> None:
        """End it with a status as the transport makes it, without an ErrorInfo."""
        self._orders.put_nowait(code)

    def fail_for(self, reason: str, code: Code) -> None:
        """End it with a reason that this version does not know."""
        status = status_pb2.Status(code=int(code), message="as a later version has it")
        status.details.add().Pack(error_details_pb2.ErrorInfo(domain=DOMAIN, reason=reason))
        self._orders.put_nowait(status)

    async def cancelled(self, why: str, seconds: float | None = None) -> None:
        """Broken unless the router cancels the call in time."""
        await self.over(f"the leg on {self.instance} cancelled: {why}", seconds)
        if not self.was_cancelled:
            raise Broken(f"expected the leg on {self.instance} cancelled: {why}; it ended before")

    async def over(self, what: str, seconds: float | None = None) -> None:
        """Broken unless the call ends in time, whoever ends it."""
        seconds = answer_s() if seconds is None else seconds
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except asyncio.TimeoutError:
            raise Broken(f"expected {what} within {seconds:g} s; it is open") from None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The handler: carries out what the case orders."""
        try:
            while (order := await self._orders.get()) is not grpc.StatusCode.OK:
                if isinstance(order, Fault):
                    await rpc.abort(context, order)
                elif isinstance(order, status_pb2.Status):
                    await rpc.abort_with(context, order)
                elif isinstance(order, grpc.StatusCode):
                    await context.abort(order, "a status of the transport's")
                else:
                    await context.write(order)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self._over.set()
