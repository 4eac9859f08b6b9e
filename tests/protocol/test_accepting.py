"""A server that is given several new calls at once begins them together; none is left waiting."""

from __future__ import annotations

import asyncio
import json
import selectors
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc

from pd_grpc.protocol import rpc
from pd_grpc.protocol.accepting import AT_ONCE, aio_server
from pd_grpc.protocol.config import ServerConfig, Sizes, Timeouts
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.waiting import until

LIMIT_S = 20.0
MANY = 500
"""Turns of the loop in which whatever needs nothing from outside is done."""

TRIES = 20


class Ears(selectors.DefaultSelector):
    """Through which a loop hears of what happens outside; while it is deaf, of nothing."""

    deaf = False

    def select(self, timeout: float | None = None) -> Any:
        return [] if self.deaf else super().select(timeout)


class Service(admin_pb2_grpc.AdminServiceServicer):
    """A call that lasts until told."""

    def __init__(self) -> None:
        self.begun = 0
        self.finish = asyncio.Event()

    async def Drain(self, request: Any, context: Any) -> admin_pb2.DrainResponse:
        self.begun += 1
        await self.finish.wait()
        return admin_pb2.DrainResponse(transfers=7)


class Door(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Counts the calls that were given to the loop; the first makes it deaf."""

    def __init__(self, ears: Ears) -> None:
        self.passed = 0
        self.first = asyncio.Event()
        self._ears = ears

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self.passed += 1
        if not self.first.is_set():
            self._ears.deaf = True
            self.first.set()
        return await continuation(handler_call_details)


class Served:
    """A server with its service, and calls that have come to it but are not begun."""

    def __init__(self, interceptors: Sequence[Any] = ()) -> None:
        self.service = Service()
        self.server = aio_server(interceptors, rpc.server_options(ServerConfig()))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.service, self.server)
        self.port = rpc.bind(self.server, "127.0.0.1", 0)

    async def start(self) -> None:
        await self.server.start()
        told = json.loads(cygrpc.channelz_get_servers(0))["server"]
        self._id = max(int(each["ref"]["serverId"]) for each in told)

    def come(self, calls: int) -> bool:
        """Whether so many have come, by the word of grpc's core."""
        told = json.loads(cygrpc.channelz_get_server(self._id))["server"]
        return int(told["data"].get("callsStarted", 0)) >= calls

    def call(self, channel: grpc.Channel, calls: int) -> list[Any]:
        """So many calls, while the loop stands still until all of them have come."""
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        made = [stub.Drain.future(admin_pb2.DrainRequest(), timeout=LIMIT_S) for _ in range(calls)]
        ends = time.monotonic() + LIMIT_S / 2
        while not self.come(calls):
            assert time.monotonic() < ends, "the calls do not come"
        return made

    async def answered(self, calls: Sequence[Any]) -> None:
        self.service.finish.set()
        await until(lambda: all(call.done() for call in calls))
        assert [call.code() for call in calls] == [grpc.StatusCode.OK] * len(calls)


@asynccontextmanager
async def serving(interceptors: Sequence[Any] = ()) -> AsyncIterator[tuple[Served, grpc.Channel]]:
    served = Served(interceptors)
    await served.start()
    try:
        with rpc.sync_channel(f"127.0.0.1:{served.port}", Timeouts(), Sizes()) as channel:
            yield served, channel
    finally:
        await served.server.stop(None)


def test_calls_that_come_together_are_given_to_the_loop_together() -> None:
    ears = Ears()

    async def run() -> int:
        door = Door(ears)
        async with serving([door]) as (served, channel):
            calls = served.call(channel, AT_ONCE)
            await door.first.wait()
            for _ in range(MANY):
                await asyncio.sleep(0)
            passed, ears.deaf = door.passed, False
            await served.answered(calls)
            return passed

    with closing(asyncio.SelectorEventLoop(ears)) as loop:
        # The thread that wakes the loop may have told of the first alone by then.
        assert any(loop.run_until_complete(run()) > 1 for _ in range(TRIES))


async def test_calls_beyond_those_that_are_given_at_once_are_served_too() -> None:
    async with serving() as (served, channel):
        calls = served.call(channel, 5 * AT_ONCE)
        await until(lambda: served.service.begun == len(calls))
        await served.answered(calls)


async def test_a_stop_answers_or_cancels_each_call_and_leaves_no_task() -> None:
    """Calls of which grpc's core has told, and that nobody has begun, are not left waiting."""
    mine = asyncio.all_tasks()
    door = Door(Ears())
    async with serving([door]) as (served, channel):
        calls = served.call(channel, 3 * AT_ONCE)
        await door.first.wait()
        served.service.finish.set()
        stopping = asyncio.create_task(served.server.stop(LIMIT_S))
        await until(lambda: all(call.done() for call in calls), LIMIT_S / 2)
        await stopping
        codes = Counter(call.code() for call in calls)
        assert codes[grpc.StatusCode.OK] == served.service.begun > 0
        assert codes.keys() <= {
            grpc.StatusCode.OK,
            grpc.StatusCode.CANCELLED,
            grpc.StatusCode.UNAVAILABLE,
        }
    await until(lambda: asyncio.all_tasks() - mine == {asyncio.current_task()})
