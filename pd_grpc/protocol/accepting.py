"""A server of grpc.aio that is given several new calls at once.

grpc.aio asks its core for the next call of a method only when it has been given the one before. In
between, a thread of the core's must wake the loop, and the loop must be given the machine: for each
call anew. Where other processes want the machine too that takes tens of milliseconds, and of a
hundred calls that come together, as when an instance has died and its requests go on elsewhere, the
last then waits for seconds before anybody has seen it.

Here `AT_ONCE` calls of each method are asked for, so that those which came together are begun
together. That is done inside of grpc.aio, for it has no option for it; where its inside is another
one, its server is used as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server

AT_ONCE = 16
"""Calls of one method that a server may be given before its loop has begun the first of them."""

_INSIDE = ("_make_request_call_future", "_request_registered_call")


def aio_server(interceptors: Sequence[Any], options: Sequence[tuple[str, Any]]) -> grpc.aio.Server:
    """A server for the loop that calls this."""
    if all(hasattr(cygrpc.AioServer, name) for name in _INSIDE):
        return cast(grpc.aio.Server, _Server(interceptors, options))
    return grpc.aio.server(interceptors=interceptors, options=options)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Its loop of calls asks `_make_request_call_future` for the next call of a method."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interceptors: Sequence[Any], options: Any
    ) -> None:
        super().__init__(loop, None, (), interceptors, options, None)
        self._on = loop
        self._given: dict[bytes, asyncio.Queue[asyncio.Task[Any]]] = {}
        self._closing = False
        self._closed = False

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Task[Any]:
        if method is None:  # Of no method that was registered: nothing that comes in numbers.
            return super()._make_request_call_future(None)  # type: ignore[no-any-return]
        if method not in self._given:
            self._given[method] = asyncio.Queue()
            for _ in range(AT_ONCE):
                self._ask_for(method)
        return self._on.create_task(self._next(method))

    async def shutdown(self, grace: float | None) -> None:
        """As grpc.aio's own, once each call that was given is begun. Of one that comes too late to
        be begun nobody may keep hold, so that its caller hears that it is cancelled."""
        if self.is_running():
            self._closing = True
            for given in self._given.values():
                await given.join()
        self._closed = True
        await super().shutdown(grace)

    async def _next(self, method: bytes) -> Any:
        given = self._given[method]
        asked = await given.get()
        given.task_done()
        return asked.result()

    def _ask_for(self, method: bytes) -> None:
        asking = self._on.create_task(self._request_registered_call(method))

        def given(asked: asyncio.Task[Any]) -> None:
            # All that are open fail once the server stops.
            failed = asked.cancelled() or asked.exception() is not None
            if failed or not self._closed:
                self._given[method].put_nowait(asked)
            if not (failed or self._closing):
                self._ask_for(method)

        asking.add_done_callback(given)


class _Server(_server.Server):
    """As `grpc.aio.server` makes it, around another core."""

    def __init__(self, interceptors: Sequence[Any], options: Sequence[tuple[str, Any]]) -> None:
        self._loop = cygrpc.get_working_loop()
        arguments = _server._augment_channel_arguments(options, None)
        self._server = _Core(self._loop, interceptors, arguments)
