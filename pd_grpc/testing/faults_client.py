"""The injector on asyncio channels."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from pd_grpc.testing.faults import WHOLE, CallFates, Direction, Fate, Injector

_TRIES = 100
"""How often a message is damaged until what comes of it is still a message."""

_NEITHER = frozenset[Direction]()
_ANSWERS = frozenset({Direction.RESPONSE})
_ASKS = frozenset({Direction.REQUEST})
_BOTH = frozenset(Direction)


def client_interceptors(injector: Injector) -> tuple[Any, ...]:
    """Interceptors for `grpc.aio.insecure_channel(..., interceptors=...)`, one for each shape of
    call, for grpc.aio takes an object for one shape alone.

    A message that the client's side damages is still one of its type, or the stub could not send
    it: a bit is flipped that leaves it so. Messages that are bytes already are damaged as they are.
    """
    tasks = _Tasks()
    return (
        _UnaryUnary(injector, tasks),
        _UnaryStream(injector, tasks),
        _StreamUnary(injector, tasks),
        _StreamStream(injector, tasks),
    )


class _Tasks:
    """Work that outlives the call that began it."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="pd-injected")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


class _Deadline:
    """When a call ends, whatever holds it."""

    def __init__(self, timeout_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._at = None if timeout_s is None else self._loop.time() + timeout_s

    def left(self) -> float | None:
        """Seconds that are left; None without a deadline."""
        return None if self._at is None else max(0.0, self._at - self._loop.time())

    async def hold(self, delay_s: float) -> None:
        """Wait. AioRpcError DEADLINE_EXCEEDED when the call's time ends before that."""
        left = self.left()
        if left is not None and left < delay_s:
            await asyncio.sleep(left)
            raise deadline_exceeded()
        if delay_s:
            await asyncio.sleep(delay_s)

    async def wait(self) -> None:
        """Wait for the call's time to end, or its caller's cancel; raises one or the other."""
        await self.hold(float("inf")) if self._at is not None else await asyncio.Event().wait()


def deadline_exceeded() -> grpc.aio.AioRpcError:
    """What a caller hears that hears nothing: a status of the transport's own."""
    nothing = grpc.aio.Metadata()
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.aio.AioRpcError(code, nothing, nothing, "Deadline Exceeded", "injected")


def damaged(message: Any, fate: Fate) -> Any:
    """The message as it arrives: bytes as bytes, a protobuf message as one of its type.

    ValueError when no damage leaves it one.
    """
    if not fate.damages:
        return message
    if not isinstance(message, Message):
        return fate.damaged(message)
    raw = message.SerializeToString()
    for _ in range(_TRIES):
        with contextlib.suppress(DecodeError):
            return type(message).FromString(fate.damaged(raw))
    raise ValueError(f"what is left is no {message.DESCRIPTOR.full_name}")


class _Unary:
    """What the calls with one request have in common."""

    def __init__(self, injector: Injector, tasks: _Tasks) -> None:
        self._injector = injector
        self._tasks = tasks

    async def _begin(
        self, continuation: Any, details: Any, request: Any, fate: Fate, read: Callable[..., Any]
    ) -> Any:
        """The call as it is made. Nothing is awaited after that: of calls with a stream of answers
        grpc wraps the one that was made last, and that must not be the copy."""
        deadline = _Deadline(details.timeout)
        await deadline.hold(fate.delay_s)
        request = damaged(request, fate)
        if fate.dropped:
            if fate.duplicated:
                self._copy(continuation, details, request, fate, read)
            await deadline.wait()
        call = await continuation(details._replace(timeout=deadline.left()), request)
        if fate.duplicated:
            self._copy(continuation, details, request, fate, read)
        return call

    def _copy(
        self, continuation: Any, details: Any, request: Any, fate: Fate, read: Callable[..., Any]
    ) -> None:
        async def send() -> None:
            await asyncio.sleep(fate.copy_delay_s)
            # Whatever is answered, nobody hears it; the channel may be closed by now.
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
                await read(await continuation(details, request))

        self._tasks.spawn(send())


class _UnaryUnary(_Unary, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        fates = self._injector.begin(_method(details), _NEITHER)
        deadline = _Deadline(details.timeout)
        call = await self._begin(continuation, details, request, fates.request(), _read_one)
        return await _answer(call, fates, deadline)


class _UnaryStream(_Unary, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        fates = self._injector.begin(_method(details), _ANSWERS)
        call = await self._begin(continuation, details, request, fates.request(), _read_all)
        return _answers(call, fates)


class _Streaming:
    """What the calls with a stream of requests have in common."""

    def __init__(self, injector: Injector, tasks: _Tasks) -> None:
        self._injector = injector
        self._tasks = tasks

    async def _begin(self, continuation: Any, details: Any, requests: Any, fates: CallFates) -> Any:
        made: list[Any] = []
        call = await continuation(details, self._requests(requests, fates, made))
        made.append(call)
        return call

    async def _requests(
        self, requests: Any, fates: CallFates, made: list[Any]
    ) -> AsyncIterator[Any]:
        source = _aiter(requests)
        # Of itself grpc waits for the next request even when the call is over.
        reading = asyncio.current_task()
        assert reading is not None
        made[0].add_done_callback(lambda _: reading.cancel())
        async for message in source:
            fate = fates.request()
            if fate.delay_s:
                await asyncio.sleep(fate.delay_s)
            if fate.half_closed:
                # The caller goes on writing: to nobody, but it must not wait for room.
                self._drain(source, made[0])
                return
            arrives = damaged(message, fate)
            if not fate.dropped:
                yield arrives
            if fate.duplicated:
                await asyncio.sleep(fate.copy_delay_s)
                yield arrives

    def _drain(self, source: AsyncIterator[Any], call: Any) -> None:
        async def drain() -> None:
            async for _ in source:
                pass

        draining = self._tasks.spawn(drain())
        call.add_done_callback(lambda _: draining.cancel())


class _StreamUnary(_Streaming, grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        # The answer is left to the stub: to wait for it here would keep the caller from writing.
        fates = self._injector.begin(_method(details), _ASKS)
        return await self._begin(continuation, details, requests, fates)


class _StreamStream(_Streaming, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        fates = self._injector.begin(_method(details), _BOTH)
        call = await self._begin(continuation, details, requests, fates)
        return _answers(call, fates)


async def _answer(call: Any, fates: CallFates, deadline: _Deadline) -> Any:
    """The only answer; the call itself where nothing happens to it."""
    message = await call
    fate = fates.response()
    if fate is WHOLE:
        return call
    await deadline.hold(fate.delay_s)
    if fate.dropped:
        await deadline.wait()
    return damaged(message, fate)


async def _answers(call: Any, fates: CallFates) -> AsyncIterator[Any]:
    ended = asyncio.Event()
    call.add_done_callback(lambda _: ended.set())
    async for message in call:
        fate = fates.response()
        if fate.half_closed:
            call.cancel()
            return
        if fate.delay_s and not await _held(call, ended, fate.delay_s):
            continue
        arrives = damaged(message, fate)
        if not fate.dropped:
            yield arrives
        if fate.duplicated and await _held(call, ended, fate.copy_delay_s):
            yield arrives


async def _held(call: Any, ended: asyncio.Event, delay_s: float) -> bool:
    """Hold a message; False when its call failed meanwhile, and nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    until = loop.time() + delay_s
    if not ended.is_set():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), delay_s)
    if ended.is_set() and await call.code() is not grpc.StatusCode.OK:
        return False
    await asyncio.sleep(max(0.0, until - loop.time()))
    return True


def _method(details: Any) -> str:
    method = details.method
    return method.decode() if isinstance(method, bytes) else str(method)


def _aiter(requests: Any) -> AsyncIterator[Any]:
    if hasattr(requests, "__aiter__"):
        return aiter(requests)

    async def each() -> AsyncIterator[Any]:
        for request in requests:
            yield request

    return each()


async def _read_one(call: Any) -> None:
    await call


async def _read_all(call: Any) -> None:
    async for _ in call:
        pass
