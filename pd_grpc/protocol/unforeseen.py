"""What nobody foresaw in a handler: a line in the log and a status, without the words of it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import grpc.aio

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event


class Unforeseen:
    """Around a handler. grpc would pass on to the caller and to the log what an exception says,
    which may be of a prompt; this tells its type, and the log where it was raised."""

    def __init__(
        self, log: InstanceLog, method: str, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        self._log = log
        self._method = method
        self._context = context

    async def __aenter__(self) -> None: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return False
        if isinstance(error, grpc.aio.InternalError):
            # What was read from or written to a call that was no more.
            raise asyncio.CancelledError from None
        self._log.note(Event.DEFECT, "%s failed", self._method, error=error)
        await rpc.abort(self._context, defect(error))


def defect(error: BaseException, what: str = "the server failed") -> Fault:
    """The fault that an exception is which nobody foresaw."""
    return Fault(Reason.ENGINE_ERROR, f"{what}: {type(error).__name__}")
