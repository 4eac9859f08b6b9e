"""Between a shard's receiver and one Transfer stream."""

from __future__ import annotations

import asyncio
from collections import deque

from pd_grpc.protocol.faults import Fault
from pd_grpc.v1 import transfer_pb2

MAX_ACK_RANGES = 4096
"""Chunks that one ack may speak of; with as many waiting nothing more is read."""

ACK_WAIT_S = 0.004
"""How long an ack of few bytes waits for more to speak of. What P frees by it, it can wait that
long for, and the end of a stream waits for nothing. A window of 8 MiB in that time is 2 GiB/s."""


class TransferOutbox:
    """Words on their way to one sender. Acks that pile up behind it become one.

    So do acks that come soon after each other: either end pays for a word about as much as for
    moving a quarter of a chunk.
    """

    def __init__(self, ack_bytes: int = 0) -> None:
        """An ack of fewer new bytes than `ack_bytes` waits `ACK_WAIT_S` for more; that must leave
        the sender room in its window."""
        self._ack_bytes = ack_bytes
        self._acked_bytes = 0
        """The sender knows of, or will with what has left here."""
        self._messages: deque[transfer_pb2.TransferResponse] = deque()
        self._fault: Fault | None = None
        self._over = False
        self._ready = asyncio.Event()
        self._due = asyncio.Event()
        """What is in front waits for nothing more."""
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
        if not self._waits():
            self._due.set()
        self._ready.set()

    def end(self, fault: Fault | None) -> None:
        """The stream is over once what was sent before has left; the first end counts."""
        if not self._over:
            self._fault = fault
            self._over = True
            self._ready.set()
            self._due.set()

    async def room(self) -> None:
        """Wait until more may be sent."""
        await self._room.wait()

    async def next(self) -> transfer_pb2.TransferResponse | None:
        """The next message; None at the end. Raises the fault it ended with."""
        await self._ready.wait()
        if self._waits():
            self._due.clear()
            timer = asyncio.get_running_loop().call_later(ACK_WAIT_S, self._due.set)
            try:
                await self._due.wait()
            finally:
                timer.cancel()
        if self._messages:
            message = self._messages.popleft()
            if message.HasField("ack"):
                self._acked_bytes = message.ack.accepted_bytes
            self._room.set()
            if not self._messages and not self._over:
                self._ready.clear()
            return message
        if self._fault is not None:
            raise self._fault
        return None

    def _waits(self) -> bool:
        """Whether all there is to say is an ack of little."""
        if self._over or len(self._messages) != 1 or not self._messages[0].HasField("ack"):
            return False
        return self._messages[0].ack.accepted_bytes - self._acked_bytes < self._ack_bytes
