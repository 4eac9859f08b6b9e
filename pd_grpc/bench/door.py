"""D's door: when an Allocate reaches D's machine.

In engines whose scheduler owns the blocks an Allocate is looked at between two steps. Our D answers
at once, so the benchmark puts a door in front of it, the same for every row.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pd_grpc.decode.runtime import DecodeRuntime
from pd_grpc.decode.service import Context, DecodeInference, DecodeService
from pd_grpc.protocol.config import Timeouts
from pd_grpc.protocol.posting import post
from pd_grpc.v1 import decode_pb2


@dataclass(frozen=True)
class Manners:
    """How a D treats Allocates beyond waiting for a step's end: it lets them in after `delay_s`, or
    never, or has no blocks for them."""

    delay_s: float = 0.0
    silent: bool = False
    full: bool = False


class Door:
    """To be made on D's loop; `step` is called on the engine thread."""

    def __init__(self) -> None:
        self.manners = Manners()
        """Of the Allocates that come from now on."""
        self._loop = asyncio.get_running_loop()
        self._open = asyncio.Event()
        self._open.set()

    def step(self, running: bool) -> None:
        """A step begins or ends."""
        post(self._loop, self._open.clear if running else self._open.set)

    async def enter(self) -> None:
        """Wait to be let in."""
        if self.manners.silent:
            await self._loop.create_future()
        if self.manners.delay_s:
            await asyncio.sleep(self.manners.delay_s)
        await self._open.wait()


class DoorService(DecodeService):
    """D's service behind a door."""

    def __init__(self, runtime: DecodeRuntime, timeouts: Timeouts, door: Door) -> None:
        super().__init__(runtime, timeouts)
        self._door = door

    async def Allocate(
        self, request: decode_pb2.AllocateRequest, context: Context
    ) -> decode_pb2.AllocateResponse:
        await self._door.enter()
        return await super().Allocate(request, context)


class WholeAnswers(DecodeInference):
    """Sends each answer in one message.

    One for each of 256 requests after each scaled step would take both cores for itself; it has
    nothing to do with preparing, and is the same in every row.
    """

    whole_answers = True
