"""The injector on asyncio servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any, NoReturn

import grpc
import grpc.aio

from pd_grpc.protocol.interception import ServerInterceptor
from pd_grpc.testing.faults import CallFates, Direction, Fate, Injector

_Parse = Callable[[bytes], Any]
_Write = Callable[[Any], bytes]
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class FaultServerInterceptor(ServerInterceptor):
    """For `grpc.aio.server(interceptors=[FaultServerInterceptor(injector)])`.

    It works on the bytes of each message, between the wire and the handler's own codec, so that a
    corrupted one may be no message at all. A request that is dropped, and an answer, leave the call
    open until its caller ends it. Handlers that are neither coroutines nor asynchronous generators
    are left alone.
    """

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        served = _Served(self._injector, handler_call_details.method, handler)
        return served.handler() if served.asynchronous else handler


class _Served:
    """One method, with the injector around its handler."""

    def __init__(self, injector: Injector, method: str, handler: Any) -> None:
        self._injector = injector
        self._method = method
        self._asks = "stream" if handler.request_streaming else "unary"
        self._answers = "stream" if handler.response_streaming else "unary"
        self._behaviour = getattr(handler, f"{self._asks}_{self._answers}")
        self._parse: _Parse = handler.request_deserializer or _as_it_is
        self._write: _Write = handler.response_serializer or _as_it_is
        self._streams = {
            direction
            for direction, shape in (
                (Direction.REQUEST, self._asks),
                (Direction.RESPONSE, self._answers),
            )
            if shape == "stream"
        }

    @property
    def asynchronous(self) -> bool:
        """Whether it can be struck."""
        return iscoroutinefunction(self._behaviour) or isasyncgenfunction(self._behaviour)

    def handler(self) -> Any:
        """What takes bytes and gives bytes."""
        make = getattr(grpc, f"{self._asks}_{self._answers}_rpc_method_handler")
        return make(self._handle, None, None)

    async def _handle(self, asked: Any, context: Any) -> bytes | None:
        fates = self._injector.begin(self._method, self._streams)
        outgoing = _Context(context, fates, self._write)
        if Direction.REQUEST in self._streams:
            incoming = outgoing.incoming = _Incoming(aiter(asked), fates, self._parse)
            return await self._run(incoming, outgoing, fates)
        fate = fates.request()
        await asyncio.sleep(fate.delay_s)
        asked = fate.damaged(asked)
        answer = None
        if not fate.dropped:
            answer = await self._run(self._parse(asked), outgoing, fates)
        if fate.duplicated:
            await asyncio.sleep(fate.copy_delay_s)
            answer = await self._run(self._parse(asked), outgoing, fates)
        elif fate.dropped:
            await _for_ever()
        return answer

    async def _run(self, request: Any, context: _Context, fates: CallFates) -> bytes | None:
        if Direction.RESPONSE not in self._streams:
            answer = self._write(await self._behaviour(request, context))
            return await _arrival(answer, fates.response())
        with contextlib.suppress(_HalfClosed):
            if isasyncgenfunction(self._behaviour):
                async with contextlib.aclosing(self._behaviour(request, context)) as answers:
                    async for message in answers:
                        await context.write(message)
            else:
                await self._behaviour(request, context)
        return None


class _HalfClosed(Exception):
    """The answers end here."""


class _Context:
    """A handler's context, whose stream is struck; all else is grpc's own."""

    def __init__(self, context: Any, fates: CallFates, serialize: _Write) -> None:
        self.incoming: _Incoming | None = None
        self._context = context
        self._fates = fates
        self._serialize = serialize

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """The next request; EOF after the last."""
        assert self.incoming is not None
        return await self.incoming.read()

    async def write(self, message: Any) -> None:
        """Write an answer."""
        fate = self._fates.response()
        await asyncio.sleep(fate.delay_s)
        if fate.half_closed:
            raise _HalfClosed
        arrives = fate.damaged(self._serialize(message))
        if not fate.dropped:
            await self._context.write(arrives)
        if fate.duplicated:
            await asyncio.sleep(fate.copy_delay_s)
            await self._context.write(arrives)


class _Incoming:
    """A handler's requests."""

    def __init__(self, requests: AsyncIterator[bytes], fates: CallFates, parse: _Parse) -> None:
        self._requests = requests
        self._fates = fates
        self._parse = parse
        self._copy: tuple[float, bytes] | None = None
        self._ended = False

    def __aiter__(self) -> _Incoming:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is _EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """The next request; EOF after the last."""
        while not self._ended:
            if self._copy is not None:
                (delay_s, again), self._copy = self._copy, None
                await asyncio.sleep(delay_s)
                return self._parse(again)
            raw = await anext(self._requests, None)
            if raw is None:
                break
            fate = self._fates.request()
            await asyncio.sleep(fate.delay_s)
            if fate.half_closed:
                break
            raw = fate.damaged(raw)
            if fate.duplicated:
                self._copy = fate.copy_delay_s, raw
            if not fate.dropped:
                return self._parse(raw)
        self._ended = True
        return _EOF


async def _arrival(answer: bytes, fate: Fate) -> bytes:
    await asyncio.sleep(fate.delay_s)
    if fate.dropped:
        await _for_ever()
    return fate.damaged(answer)


async def _for_ever() -> NoReturn:
    """Until the call ends, which cancels its handler."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def _as_it_is(message: Any) -> Any:
    return message
