"""Between D's machine and the streams that carry its words: nothing here decides anything."""

from __future__ import annotations

import asyncio
from collections import deque

from pd_grpc.decode.actions import TokenOut
from pd_grpc.engine.stopping import Finish
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import MAX_TOKENS_PER_MESSAGE
from pd_grpc.v1 import decode_pb2, inference_pb2, types_pb2


class TokenOutbox:
    """Tokens on their way to one client. What piles up behind a slow reader goes as one message, or
    as the few that any client can take."""

    def __init__(self, decode_instance: str) -> None:
        self._instance = decode_instance
        self._tokens: list[TokenOut] = []
        self._end: inference_pb2.GenerateResponse | None = None
        self._fault: Fault | None = None
        self._closed = False
        self._whole = False
        self._ready = asyncio.Event()

    def keep_whole(self) -> None:
        """Send nothing before the answer is complete."""
        self._whole = True

    def tokens(self, tokens: tuple[TokenOut, ...]) -> None:
        """More tokens."""
        self._tokens += tokens
        if not self._whole:
            self._ready.set()

    def finish(
        self, reason: Finish, usage: types_pb2.Usage, timings: types_pb2.Timings | None
    ) -> None:
        """The answer is complete."""
        self._end = inference_pb2.GenerateResponse(
            finish_reason=reason.wire,
            usage=usage,
            timings=timings,
            decode_instance=self._instance,
        )
        self._close()

    def fail(self, fault: Fault) -> None:
        """The answer has ended with a fault; tokens shown before it are still sent."""
        self._fault = fault
        self._close()

    async def next(self) -> inference_pb2.GenerateResponse | None:
        """The next message; None when the answer is complete. Raises its fault."""
        await self._ready.wait()
        if not self._closed:
            self._ready.clear()
        if self._tokens:
            message = self._message()
            if self._tokens:
                self._ready.set()
            return message
        if self._end is not None:
            last, self._end = self._end, None
            return last
        if self._fault is not None:
            raise self._fault
        return None

    def _message(self) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse()
        now = self._tokens[:MAX_TOKENS_PER_MESSAGE]
        del self._tokens[:MAX_TOKENS_PER_MESSAGE]
        if self._end is not None and not self._tokens:
            message, self._end = self._end, None
        message.token_ids.extend(token.token_id for token in now)
        message.logprobs.extend(t.logprobs for t in now if t.logprobs is not None)
        return message

    def _close(self) -> None:
        self._closed = True
        self._ready.set()


MESSAGE_OVERHEAD_BYTES = 256
"""What a message costs in memory beside its own bytes, about."""


class SessionOutbox:
    """Messages on their way to one P. How many there are is up to P, which makes D talk and may not
    listen: of more than `limit_bytes` nothing is kept, and the session is over."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._messages: deque[decode_pb2.SessionResponse] = deque()
        self._fault: Fault | None = None
        self._over = False
        self._ready = asyncio.Event()

    def send(self, message: decode_pb2.SessionResponse) -> bool:
        """One more message; False when P does not read and the session is over for that."""
        if self._over:
            return True
        self._bytes += _cost(message)
        if self._bytes > self._limit_bytes:
            self._messages.clear()
            text = f"more than {self._limit_bytes} bytes wait for this prefill to read them"
            self.end(Fault(Reason.LEASE_EXPIRED, text))
            return False
        self._messages.append(message)
        self._ready.set()
        return True

    def end(self, fault: Fault | None) -> None:
        """The session is over once what was sent before has left; the first end counts."""
        if not self._over:
            self._fault = fault
            self._over = True
            self._ready.set()

    async def next(self) -> decode_pb2.SessionResponse | None:
        """The next message; None at the end. Raises the fault it ended with."""
        await self._ready.wait()
        if self._messages:
            message = self._messages.popleft()
            self._bytes -= _cost(message)
            if not self._messages and not self._over:
                self._ready.clear()
            return message
        if self._fault is not None:
            raise self._fault
        return None


def _cost(message: decode_pb2.SessionResponse) -> int:
    return message.ByteSize() + MESSAGE_OVERHEAD_BYTES
