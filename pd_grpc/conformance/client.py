"""The kit as a client of D, or of the router: the leg that shows the answer."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import Stream, check_fault
from pd_grpc.conformance.case import Broken, broken, expect_equal
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.faults import STATUS_TABLE, Fault, Reason, TransportFault
from pd_grpc.v1 import inference_pb2


class ClientLeg:
    """A Generate call, and what it has shown so far."""

    def __init__(self, call: Any, transcript: Transcript) -> None:
        self.stream = Stream(call, "Generate", transcript)
        self.messages: list[inference_pb2.GenerateResponse] = []

    @property
    def tokens(self) -> list[int]:
        """Every token shown so far."""
        return [token for message in self.messages for token in message.token_ids]

    @property
    def last(self) -> inference_pb2.GenerateResponse:
        """The message shown last. Broken when there is none."""
        if not self.messages:
            raise Broken("expected a message of Generate; none came")
        return self.messages[-1]

    async def next(self, seconds: float | None = None) -> inference_pb2.GenerateResponse:
        """The next message."""
        message: inference_pb2.GenerateResponse = await self.stream.read(
            "a message of Generate", seconds
        )
        self.messages.append(message)
        return message

    async def finished(self, seconds: float | None = None) -> list[int]:
        """Read to the end, which must be OK; returns every token."""
        await self._read_on(seconds)
        await self.stream.fine("the answer is complete")
        return self.tokens

    async def answers(self, wanted: list[int], seconds: float | None = None) -> None:
        """Broken unless it ends with OK after exactly these tokens."""
        expect_equal(await self.finished(seconds), wanted, "the tokens")

    async def fails(self, reason: Reason, what: str, seconds: float | None = None) -> Fault:
        """Read to the end, which must be this fault with the code that the table has between
        instances or for clients."""
        await self._read_on(seconds)
        fault = await self.stream.outcome(seconds)
        row = STATUS_TABLE[reason]
        if isinstance(fault, Fault) and fault.code is row.client:
            return check_fault(fault, reason, what, row.client)
        return check_fault(fault, reason, what)

    async def outcome(self, seconds: float | None = None) -> Fault | TransportFault | None:
        """Read to the end; the fault it is, None for OK."""
        await self._read_on(seconds)
        return await self.stream.outcome(seconds)

    async def ends(self, seconds: float | None = None) -> str:
        """Read to the end, whatever it is."""
        await self._read_on(seconds)
        return await self.stream.ended(seconds)

    async def shows_nothing(self, seconds: float, what: str) -> None:
        """Broken when a message comes or the call ends within so long."""
        await self.stream.silent(seconds, what)

    async def leave(self) -> None:
        """The client goes."""
        await self.stream.leave()

    async def _read_on(self, seconds: float | None) -> None:
        what = "the next token or the end"
        while (message := await self.stream.next(what, seconds)) is not None:
            if not isinstance(message, inference_pb2.GenerateResponse):
                broken("a GenerateResponse", message)
            self.messages.append(message)
