"""Server interceptors that make a span and a duration of each call, for grpc.aio and for grpc.

What a handler does runs in the context of its call's span: `opentelemetry.context.get_current()`.
OpenTelemetry's packaged ones have older attributes and leave failed calls without a status.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from opentelemetry import context as current

from pd_grpc.telemetry.rpc_calls import OK, Call, Calls, full_name

if TYPE_CHECKING:  # generic in the stubs alone
    _AioInterceptor = grpc.aio.ServerInterceptor[Any, Any]
    _Interceptor = grpc.ServerInterceptor[Any, Any]
else:
    _AioInterceptor = grpc.aio.ServerInterceptor
    _Interceptor = grpc.ServerInterceptor

_CANCELLED = grpc.StatusCode.CANCELLED.name
_DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED.name
_UNKNOWN = grpc.StatusCode.UNKNOWN.name
_BY_NUMBER = {code.value[0]: code.name for code in grpc.StatusCode}


class ServedCalls(_AioInterceptor):
    """For servers of grpc.aio: the outermost interceptor, so that it sees what becomes of a call.

    Nothing is recorded before `connect`: the name of an instance may hang on the port that its
    server has.
    """

    def __init__(self, calls: Calls | None = None) -> None:
        self._calls = calls

    def connect(self, calls: Calls) -> None:
        """Record from now on."""
        self._calls = calls

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        calls = self._calls
        if handler is None or calls is None:
            return handler
        shape = shape_of(handler)
        behaviour = getattr(handler, shape)
        if not (iscoroutinefunction(behaviour) or isasyncgenfunction(behaviour)):
            return handler  # what a servicer leaves out
        watch = _watch_generator if isasyncgenfunction(behaviour) else _watch_coroutine
        method = full_name(handler_call_details.method)
        return _with(handler, shape, watch(calls, method, behaviour))


class SyncServedCalls(_Interceptor):
    """For servers of plain grpc, whose handlers run on threads."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None:
            return None  # an unknown method: grpc answers UNIMPLEMENTED
        shape = shape_of(handler)
        watch = _watch_iterator if handler.response_streaming else _watch_function
        method = full_name(handler_call_details.method)
        return _with(handler, shape, watch(self._calls, method, getattr(handler, shape)))


# --- grpc.aio -------------------------------------------------------------------------------------


def _watch_coroutine(calls: Calls, method: str, behaviour: Callable[..., Any]) -> Any:
    async def handle(request: Any, context: Any) -> Any:
        with _served(calls, method, context):
            return await behaviour(request, context)

    return handle


def _watch_generator(calls: Calls, method: str, behaviour: Callable[..., Any]) -> Any:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
        with _served(calls, method, context):
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

    return handle


@contextmanager
def _served(calls: Calls, method: str, context: Any) -> Iterator[None]:
    call, its = calls.served(method, context.invocation_metadata())
    token = current.attach(its)
    code = _UNKNOWN
    try:
        yield
        code = _code_of(context) or OK
    except (asyncio.CancelledError, GeneratorExit):
        # The caller's deadline, and whatever ends the call before its handler, cancel alike.
        left = context.time_remaining()
        code = _DEADLINE if left is not None and left <= 0 else _CANCELLED
        raise
    except grpc.aio.AbortError:
        code = _code_of(context) or _UNKNOWN
        raise
    finally:
        call.ended(code, context.trailing_metadata())
        current.detach(token)


# --- grpc -----------------------------------------------------------------------------------------


def _watch_function(calls: Calls, method: str, behaviour: Callable[..., Any]) -> Any:
    def handle(request: Any, context: Any) -> Any:
        call, its = calls.served(method, context.invocation_metadata())
        _end_with(call, context)
        context_of_call = contextvars.copy_context()
        context_of_call.run(current.attach, its)
        ended = False
        try:
            response = context_of_call.run(behaviour, request, context)
            ended = True
            return response
        finally:
            _tell(call, context, ended)

    return handle


def _watch_iterator(calls: Calls, method: str, behaviour: Callable[..., Any]) -> Any:
    def handle(request: Any, context: Any) -> Iterator[Any]:
        call, its = calls.served(method, context.invocation_metadata())
        _end_with(call, context)
        context_of_call = contextvars.copy_context()
        context_of_call.run(current.attach, its)
        ended = False
        nothing = object()
        try:
            responses = iter(context_of_call.run(behaviour, request, context))
            while (response := context_of_call.run(next, responses, nothing)) is not nothing:
                yield response
            ended = True
        finally:
            _tell(call, context, ended)

    return handle


def _tell(call: Call, context: Any, ended: bool) -> None:
    code = _code_of(context)
    if not context.is_active() and code is None:
        return  # Whoever left is told of by the end of the call.
    call.ended(code or (OK if ended else _UNKNOWN), context.trailing_metadata())


def _end_with(call: Call, context: Any) -> None:
    """A caller that leaves, or whose time is over, ends the call before its handler."""

    def gone() -> None:
        left = context.time_remaining()
        call.ended(_DEADLINE if left is not None and left <= 0 else _CANCELLED)

    if not context.add_callback(gone):
        gone()


# --------------------------------------------------------------------------------------------------


def shape_of(handler: Any) -> str:
    """The attribute of a method handler that holds its behaviour."""
    request = "stream" if handler.request_streaming else "unary"
    response = "stream" if handler.response_streaming else "unary"
    return f"{request}_{response}"


def _with(handler: Any, shape: str, behaviour: Any) -> Any:
    make = getattr(grpc, f"{shape}_rpc_method_handler")
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _code_of(context: Any) -> str | None:
    """The status that a handler has set; None when it has set none."""
    code = context.code()
    if code is None:
        return None
    return code.name if isinstance(code, grpc.StatusCode) else _BY_NUMBER.get(code, _UNKNOWN)
