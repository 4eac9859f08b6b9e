"""How much waits in the router for one client, so that it is no more than a bound for one that does
not read."""

from __future__ import annotations

import asyncio

from pd_grpc.v1 import inference_pb2


class Unread:
    """Tokens of all answers to one request that its client has not taken, each log-probability as
    one more. Once they are `most` the legs of its answers are not read on: D keeps what follows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.waiting = 0
        """How many these are now."""
        self._room = asyncio.Event()
        self._room.set()

    def came(self, message: inference_pb2.GenerateResponse) -> None:
        """D has sent this."""
        self._count(size_of(message))

    def taken(self, message: inference_pb2.GenerateResponse) -> None:
        """The client is given this, which may be of several messages of D's, or a part of one."""
        self._count(-size_of(message))

    async def room(self) -> None:
        """Wait until a leg may be read on."""
        await self._room.wait()

    def _count(self, size: int) -> None:
        self.waiting += size
        if self.waiting < self._most:
            self._room.set()
        else:
            self._room.clear()


def size_of(message: inference_pb2.GenerateResponse) -> int:
    """Its tokens and log-probabilities."""
    return len(message.token_ids) + sum(1 + len(each.top) for each in message.logprobs)
