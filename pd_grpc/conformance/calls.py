"""Calls to a subject: answers with a limit of time, and faults that must be ours."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import status_pb2

from pd_grpc.conformance.case import (
    Broken,
    NotApplicable,
    broken,
    expect,
    expect_equal,
    parsed,
    show,
    within,
)
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.faults import STATUS_TABLE, Code, Fault, Reason, TransportFault
from pd_grpc.protocol.rpc import STATUS_METADATA, read_error

M = TypeVar("M", bound=Message)

MOST_MESSAGES = 100_000
"""Of one stream, in a case of a few seconds; a subject that sends more floods the kit."""


async def answer(call: Awaitable[M], what: str, seconds: float | None = None) -> M:
    """The answer of a unary call. Broken when it fails or takes too long."""
    try:
        got: M | None = await within(seconds, call, what)
    except grpc.RpcError as error:
        broken(what, read_error(error))
    if got is None:
        # As grpc has it where the bytes are no message of the type.
        broken(what, "an answer that cannot be read")
    return got


async def if_served(call: Awaitable[M], what: str) -> M:
    """The answer of a unary call of a service that a subject may do without. NotApplicable when it
    does; Broken when the call fails or takes too long."""
    try:
        return await within(None, call, what)
    except grpc.RpcError as error:
        fault = read_error(error)
        if isinstance(fault, TransportFault) and fault.code is Code.UNIMPLEMENTED:
            raise NotApplicable(f"{what} is not served") from None
        broken(what, fault)


async def refusal_if_served(call: Awaitable[object], reason: Reason, what: str) -> Fault:
    """The fault of a unary call that must be refused for `reason`, of a service that a subject may
    do without. NotApplicable when it does."""
    try:
        got = await within(None, call, f"{reason.value}: {what}")
    except grpc.RpcError as error:
        fault = read_error(error)
        if isinstance(fault, TransportFault) and fault.code is Code.UNIMPLEMENTED:
            raise NotApplicable("the method is not served") from None
        return check_fault(fault, reason, what)
    broken(f"{reason.value}: {what}", got)


async def refusal(
    call: Awaitable[object], reason: Reason, what: str, seconds: float | None = None
) -> Fault:
    """The fault of a unary call that must be refused for `reason`, with the table's code."""
    return (await refusal_details(call, reason, what, seconds))[0]


async def refusal_details(
    call: Awaitable[object], reason: Reason, what: str, seconds: float | None = None
) -> tuple[Fault, status_pb2.Status]:
    """The same, with the status as it was sent."""
    wanted = f"{STATUS_TABLE[reason].code.name} {reason.value}: {what}"
    try:
        got = await within(seconds, call, wanted)
    except grpc.RpcError as error:
        metadata: Any = error.trailing_metadata()
        details = dict(metadata or ()).get(STATUS_METADATA, b"")
        fault = check_fault(read_error(error), reason, what)
        return fault, parsed(status_pb2.Status.FromString, details, f"{STATUS_METADATA} of {fault}")
    broken(wanted, got)


def check_fault(
    fault: Fault | TransportFault | None, reason: Reason, what: str, code: Code | None = None
) -> Fault:
    """The fault, if it has this reason and its code; the table's code unless one is given."""
    code = STATUS_TABLE[reason].code if code is None else code
    wanted = f"{code.name} with ErrorInfo reason {reason.value}: {what}"
    if not isinstance(fault, Fault):
        broken(wanted, "OK" if fault is None else f"{fault} (without an ErrorInfo of pd_grpc)")
    expect(fault.reason is reason and fault.code is code, wanted, f"{fault}")
    return fault


def check_field(fault: Fault, name: str) -> None:
    """Broken unless BadRequest names a field called `name`, wherever it lies in the message."""
    called = [re.sub(r"\[\d+\]", "", wrong.field).split(".")[-1] for wrong in fault.fields]
    expect(name in called, f"a violation of BadRequest that names {name}", called)


def check_feature(fault: Fault, path: str) -> None:
    """Broken unless the metadata names the field that needs what is not built, by its path."""
    expect_equal(fault.metadata.get("feature"), path, "metadata 'feature'")


def check_metadata(fault: Fault, **wanted: object) -> None:
    """Broken unless the metadata of ErrorInfo has these values, written as text."""
    for key, value in wanted.items():
        expect_equal(fault.metadata.get(key), str(value), f"metadata {key!r}")


class Stream:
    """A stream call to the subject: what is sent, and what comes back with a limit of time.

    Messages are read as they come, so that waiting in vain leaves the call as it is.
    """

    def __init__(self, call: Any, method: str, transcript: Transcript) -> None:
        self._call = call
        self._method = method
        self._transcript = transcript
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        # grpc takes one write at a time.
        self._writing = asyncio.Lock()
        self._number = 0
        self._reader = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            while isinstance(message := await self._call.read(), Message):
                self._came.put_nowait(message)
                self._number += 1
                if self._number >= MOST_MESSAGES:
                    self._transcript.sent(self._method, f"left after {self._number} messages")
                    self._call.cancel()
                    break
        self._came.put_nowait(None)

    async def send(self, message: Message) -> None:
        """Send a message. Broken when the subject has ended the call."""
        try:
            await self._write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            broken(f"{self._method} open for {show(message)}", await self.ended())

    async def offer(self, message: Message) -> None:
        """Send a message that the subject may be about to refuse."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._write(message)

    async def _write(self, message: Message) -> None:
        async with self._writing:
            await within(None, self._call.write(message), f"room to write to {self._method}")

    async def half_close(self) -> None:
        """Say that no more comes."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def read(self, what: str, seconds: float | None = None) -> Any:
        """The next message. Broken when the call ends instead or nothing comes."""
        message = await self.next(what, seconds)
        if message is None:
            broken(what, f"the end of {self._method}: {await self.ended()}")
        return message

    async def next(self, what: str, seconds: float | None = None) -> Any | None:
        """The next message, None at the end of the call, whatever its status."""
        message = await within(seconds, self._came.get(), what)
        if message is None:
            self._came.put_nowait(None)
        return message

    async def wait_for_message(self) -> Any | None:
        """The next message whenever it comes, None at the end of the call; for a call that stays
        open."""
        message = await self._came.get()
        if message is None:
            self._came.put_nowait(None)
        return message

    async def silent(self, seconds: float, what: str) -> None:
        """Broken when the subject sends anything, or ends the call, within so long."""
        try:
            message = await asyncio.wait_for(self._came.get(), seconds)
        except asyncio.TimeoutError:
            return
        if message is None:
            self._came.put_nowait(None)
            broken(what, f"the end of {self._method}: {await self.ended()}")
        broken(what, message)

    async def ended(self, seconds: float | None = None) -> str:
        """How the call ended, for people."""
        fault = await self.outcome(seconds)
        return "OK" if fault is None else str(fault)

    async def outcome(self, seconds: float | None = None) -> Fault | TransportFault | None:
        """How the call ended, once everything has been read; None for OK."""
        while await self.next(f"the end of {self._method}", seconds) is not None:
            pass
        code = await within(seconds, self._call.code(), f"the end of {self._method}")
        if code is grpc.StatusCode.OK:
            self._transcript.received(self._method, "ended: OK")
            return None
        fault = read_error(
            grpc.aio.AioRpcError(
                code,
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                await self._call.details(),
                None,
            )
        )
        self._transcript.received(self._method, f"ended: {fault}")
        return fault

    async def refused(self, reason: Reason, what: str, seconds: float | None = None) -> Fault:
        """The fault it ended with, which must have this reason and the table's code."""
        return check_fault(await self.outcome(seconds), reason, what)

    async def fine(self, what: str, seconds: float | None = None) -> None:
        """It ended with OK."""
        fault = await self.outcome(seconds)
        if fault is not None:
            raise Broken(f"expected OK: {what}; got {fault}")

    async def leave(self) -> None:
        """Cancel the call, and wait until nothing of it is left here."""
        self._call.cancel()
        await self._reader

    async def wait_for_end(self) -> None:
        """Wait until the subject has ended the call; what it sent can still be read."""
        await asyncio.wait([self._reader])

    @property
    def is_over(self) -> bool:
        """Whether the subject has ended the call."""
        return bool(self._call.done())
