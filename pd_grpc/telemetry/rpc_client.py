"""Channels that make a span and a duration of each call made on them, for grpc.aio and for grpc.

They take the place of a client interceptor, and the calls stay grpc's own: what an interceptor
returns of grpc.aio writes through a queue of its own, and plain grpc's has no `cancel` where the
packaged instrumentation makes a generator of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from pd_grpc.telemetry.rpc_calls import OK, Call, Calls, full_name

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_UNKNOWN = grpc.StatusCode.UNKNOWN.name
_CANCELLED = grpc.StatusCode.CANCELLED.name


def watch_aio_channel(channel: grpc.aio.Channel, calls: Calls, endpoint: str) -> grpc.aio.Channel:
    """`channel`, with every call on it recorded as one to `endpoint` (host:port)."""
    return _AioChannel(channel, calls, endpoint)


def watch_channel(channel: grpc.Channel, calls: Calls, endpoint: str) -> grpc.Channel:
    """`channel`, with every call on it recorded as one to `endpoint` (host:port)."""
    return _Channel(channel, calls, endpoint)


def follow_aio(call: Any, recorded: Call) -> None:
    """End the record of a call of grpc.aio with the call."""
    call.add_done_callback(lambda done: _aio_done(recorded, done))


def follow(call: Any, recorded: Call) -> None:
    """End the record of a call of grpc that streams with the call."""
    # False says that it has ended already.
    if not call.add_callback(lambda: _done(recorded, call)):
        _done(recorded, call)


# --- grpc.aio -------------------------------------------------------------------------------------


class _AioChannel(grpc.aio.Channel):
    def __init__(self, channel: grpc.aio.Channel, calls: Calls, endpoint: str) -> None:
        self._channel = channel
        self._calls = calls
        self._endpoint = endpoint

    def unary_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._watched(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._watched(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._watched(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._watched(method, self._channel.stream_stream(method, *args, **kwargs))

    def _watched(self, path: Any, make: Callable[..., Any]) -> Callable[..., Any]:
        method, calls, endpoint = full_name(path), self._calls, self._endpoint

        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            recorded, sent = calls.made(method, endpoint, metadata)
            with unless_raised(recorded):
                made = make(*args, metadata=sent, **kwargs)
            follow_aio(made, recorded)
            return made

        return call

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._channel.__aexit__(*raised)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()


def _aio_done(recorded: Call, call: Any) -> None:
    code = _at_once(call.code())
    if code is None:
        recorded.ended(_CANCELLED if call.cancelled() else _UNKNOWN)
    elif code is grpc.StatusCode.OK:
        recorded.ended(OK)
    else:
        recorded.ended(code.name, _at_once(call.trailing_metadata()))


def _at_once(answer: Coroutine[Any, Any, T]) -> T | None:
    """What a call that is done answers, which it does without waiting; None if it would wait."""
    try:
        answer.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    answer.close()
    return None


# --- grpc -----------------------------------------------------------------------------------------


class _Channel(grpc.Channel):
    def __init__(self, channel: grpc.Channel, calls: Calls, endpoint: str) -> None:
        self._channel = channel
        self._calls = calls
        self._endpoint = endpoint

    def unary_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._answering(method, self._channel.unary_unary(method, *args, **kwargs))

    def stream_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._answering(method, self._channel.stream_unary(method, *args, **kwargs))

    def unary_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._streaming(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._streaming(method, self._channel.stream_stream(method, *args, **kwargs))

    def _answering(self, path: Any, callable: Any) -> _Answering:
        return _Answering(callable, self._calls, full_name(path), self._endpoint)

    def _streaming(self, path: Any, make: Callable[..., Any]) -> Callable[..., Any]:
        method, calls, endpoint = full_name(path), self._calls, self._endpoint

        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            recorded, sent = calls.made(method, endpoint, metadata)
            with unless_raised(recorded):
                made = make(*args, metadata=_pairs(sent), **kwargs)
            follow(made, recorded)
            return made

        return call

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()


class _Answering:
    """A method with one response: to be waited for, or a future."""

    def __init__(self, callable: Any, calls: Calls, method: str, endpoint: str) -> None:
        self._callable = callable
        self._calls = calls
        self._method = method
        self._endpoint = endpoint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        response, _ = self.with_call(*args, **kwargs)
        return response

    def with_call(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        recorded, sent = self._calls.made(self._method, self._endpoint, metadata)
        with unless_raised(recorded):
            response, call = self._callable.with_call(*args, metadata=_pairs(sent), **kwargs)
        recorded.ended(OK)
        return response, call

    def future(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        recorded, sent = self._calls.made(self._method, self._endpoint, metadata)
        with unless_raised(recorded):
            future = self._callable.future(*args, metadata=_pairs(sent), **kwargs)
        future.add_done_callback(lambda done: _done(recorded, done))
        return future


def _done(recorded: Call, call: Any) -> None:
    if call.code() is grpc.StatusCode.OK:
        recorded.ended(OK)
    else:
        recorded.ended(call.code().name, call.trailing_metadata())


def _pairs(metadata: Any) -> Any:
    return None if metadata is None else tuple(metadata)


# --------------------------------------------------------------------------------------------------


class unless_raised:
    """Ends a call that raises in the making: with its status if that is what was raised."""

    def __init__(self, recorded: Call) -> None:
        self._recorded = recorded

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        if isinstance(error, grpc.RpcError):
            _done(self._recorded, error)
        else:
            self._recorded.ended(_UNKNOWN)
