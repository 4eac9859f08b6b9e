"""Between a shard's receiver and one Transfer stream."""

from __future__ import annotations

import asyncio
from collections import deque

from pd_grpc.protocol.faults import Fault
from pd_grpc.v1 import transfer_pb2

MAX_ACK_RANGES = 4096
"""Chunks that one ack may speak of; with as many waiting nothing more is read."""


class TransferOutbox:
    """Words on their way to one sender. Acks that pile up behind it become one."""

    def __init__(self) -> None:
        self._messages: deque[transfer_pb2.TransferResponse] = deque()
        self._fault: Fault | None = None
        self._over = False
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def send(self, message: transfer_pb2.TransferResponse) -> None:
        """One more message."""
        last = self._messages[-1] if self._messages else None
        if last is not None and last.HasField("ack") and message.HasField("ack"):
            last.ack.ranges.extend(message.ack.ranges)
            last.ack.accepted_bytes = message.ack.accepted_bytes
            if len(last.ack.ranges) >= MAX_ACK_RANGES:
                self._room.clear()
        else:
            self._messages.append(message)
        self._ready.set()

    def end(self, fault: Fault | None) -> None:
        """The stream is over once what was sent before has left; the first end counts."""
        if not self._over:
            self._fault = fault
            self._over = True
            self._ready.set()

    async def room(self) -> None:
        """Wait until more may be sent."""
        await self._room.wait()

    async def next(self) -> transfer_pb2.TransferResponse | None:
        """The next message; None at the end. Raises the fault it ended with."""
        await self._ready.wait()
        if self._messages:
            message = self._messages.popleft()
            self._room.set()
            if not self._messages and not self._over:
                self._ready.clear()
            return message
        if self._fault is not None:
            raise self._fault
        return None
