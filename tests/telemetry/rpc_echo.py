"""A service with a method of each shape, served by grpc or grpc.aio, whose calls are recorded.

A request is b"ok", b"fail" (FAILED_PRECONDITION, with the reason STALE_EPOCH), b"crash" or b"wait",
which waits until its call is over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from opentelemetry import trace

from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.rpc_calls import Calls
from pd_grpc.telemetry.rpc_client import watch_aio_channel, watch_channel
from pd_grpc.telemetry.rpc_server import ServedCalls, SyncServedCalls
from pd_grpc.telemetry.tracing import Tracing
from tests.telemetry.recorder import Recorder

SERVICE = "echo.v1.EchoService"
SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
FAULT = Fault(Reason.STALE_EPOCH, "another epoch")


def method_of(shape: str) -> str:
    """Full name of the method of a shape."""
    return f"{SERVICE}/{shape}"


class Echo:
    """What the handlers of either kind know of each other."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        """A handler waits for its end."""
        self.over = threading.Event()
        self.current: list[int] = []
        """Span ids that were current in a handler."""

    def noted(self) -> None:
        self.current.append(trace.get_current_span().get_span_context().span_id)

    # --- grpc.aio -----------------------------------------------------------------------------

    async def do(self, what: bytes, context: Any) -> bytes:
        await asyncio.sleep(0)  # The context of a call survives a wait.
        self.noted()
        if what == b"fail":
            await rpc.abort(context, FAULT)
        if what == b"crash":
            raise RuntimeError("a defect")
        if what == b"wait":
            self.waiting.set()
            await asyncio.Event().wait()
        return what

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        return await self.do(request, context)

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self.do(request, context)

    async def stream_unary(self, requests: Any, context: Any) -> bytes:
        return await self.do(b"".join([each async for each in requests]), context)

    async def stream_stream(self, requests: Any, context: Any) -> None:
        async for each in requests:
            await context.write(await self.do(each, context))

    # --- grpc ---------------------------------------------------------------------------------

    def sync_do(self, what: bytes, context: Any) -> bytes:
        self.noted()
        if what == b"fail":
            status = FAULT.status()
            details = ((rpc.STATUS_METADATA, status.SerializeToString()),)
            context.set_trailing_metadata(details)
            context.abort(rpc.grpc_code(FAULT.code), FAULT.message)
        if what == b"crash":
            raise RuntimeError("a defect")
        if what == b"wait":
            context.add_callback(self.over.set)
            self.waiting.set()
            assert self.over.wait(60)
        return what

    def sync_unary_unary(self, request: bytes, context: Any) -> bytes:
        return self.sync_do(request, context)

    def sync_unary_stream(self, request: bytes, context: Any) -> Iterator[bytes]:
        yield b"first"
        yield self.sync_do(request, context)

    def sync_stream_unary(self, requests: Any, context: Any) -> bytes:
        return self.sync_do(b"".join(requests), context)

    def sync_stream_stream(self, requests: Any, context: Any) -> Iterator[bytes]:
        for each in requests:
            yield self.sync_do(each, context)


def calls_of(recorder: Recorder, instance: str) -> Calls:
    """What records the calls of an instance."""
    tracing = Tracing(SystemClock(), instance, instance, recorder.provider)
    return Calls(tracing, Instruments(instance, recorder.meters), rpc.reason_in)


def _handlers(echo: Echo, prefix: str) -> Any:
    make = {shape: getattr(grpc, f"{shape}_rpc_method_handler") for shape in SHAPES}
    methods = {shape: make[shape](getattr(echo, prefix + shape)) for shape in SHAPES}
    return grpc.method_handlers_generic_handler(SERVICE, methods)


@asynccontextmanager
async def echo_server(kind: str, recorder: Recorder) -> AsyncIterator[tuple[str, Echo]]:
    """Serve with `kind` "aio" or "sync"; the endpoint, and what its handlers know."""
    echo = Echo()
    options = [("grpc.so_reuseport", 0)]
    calls = calls_of(recorder, "server")
    if kind == "aio":
        server = grpc.aio.server(interceptors=[ServedCalls(calls)], options=options)
        server.add_generic_rpc_handlers((_handlers(echo, ""),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}", echo
        await server.stop(None)
    else:
        threads = ThreadPoolExecutor(2)
        plain = grpc.server(threads, interceptors=[SyncServedCalls(calls)], options=options)
        plain.add_generic_rpc_handlers((_handlers(echo, "sync_"),))
        port = plain.add_insecure_port("127.0.0.1:0")
        plain.start()
        yield f"127.0.0.1:{port}", echo
        await asyncio.to_thread(plain.stop(None).wait)
        threads.shutdown()


class AioCaller:
    """Makes calls with grpc.aio."""

    def __init__(self, endpoint: str, calls: Calls, metadata: Any = None) -> None:
        self._channel = watch_aio_channel(grpc.aio.insecure_channel(endpoint), calls, endpoint)
        self._metadata = metadata

    async def call(self, shape: str, what: bytes, timeout: float = 20) -> str:
        """The name of the status that a call ends with."""
        made = self._make(shape, what, timeout)
        try:
            if shape.endswith("unary"):
                await made
            else:
                async for _ in made:
                    pass
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"

    async def cancel(self, shape: str, echo: Echo) -> None:
        """Cancel a call that is being handled."""
        made = self._make(shape, b"wait", 20)
        reading = asyncio.ensure_future(self._read(shape, made))
        await asyncio.to_thread(echo.waiting.wait, 10)
        made.cancel()
        await asyncio.wait([reading])

    async def _read(self, shape: str, made: Any) -> None:
        if shape.endswith("unary"):
            await made
        else:
            async for _ in made:
                pass

    def _make(self, shape: str, what: bytes, timeout: float) -> Any:
        request: Any = what if shape.startswith("unary") else _iterate(what)
        make = getattr(self._channel, shape)(f"/{method_of(shape)}")
        return make(request, timeout=timeout, metadata=self._metadata)

    async def close(self) -> None:
        await self._channel.close(None)


class SyncCaller:
    """Makes calls with grpc, a unary one as a future."""

    def __init__(self, endpoint: str, calls: Calls, metadata: Any = None) -> None:
        self._channel = watch_channel(grpc.insecure_channel(endpoint), calls, endpoint)
        self._metadata = metadata

    async def call(self, shape: str, what: bytes, timeout: float = 20) -> str:
        """The name of the status that a call ends with."""
        return await asyncio.to_thread(self._call, shape, what, timeout)

    def _call(self, shape: str, what: bytes, timeout: float) -> str:
        try:
            if shape.endswith("unary"):
                self._method(shape)(self._request(shape, what), **self._how(timeout))
            else:
                for _ in self._method(shape)(self._request(shape, what), **self._how(timeout)):
                    pass
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    async def cancel(self, shape: str, echo: Echo) -> None:
        """Cancel a call that is being handled."""
        method, request = self._method(shape), self._request(shape, b"wait")
        make = method.future if shape.endswith("unary") else method
        made = make(request, **self._how(20))
        await asyncio.to_thread(echo.waiting.wait, 10)
        made.cancel()

    def _method(self, shape: str) -> Any:
        return getattr(self._channel, shape)(f"/{method_of(shape)}")

    def _request(self, shape: str, what: bytes) -> Any:
        return what if shape.startswith("unary") else iter([what])

    def _how(self, timeout: float) -> dict[str, Any]:
        return {"timeout": timeout, "metadata": self._metadata}

    async def close(self) -> None:
        self._channel.close()


async def _iterate(what: bytes) -> AsyncIterator[bytes]:
    yield what


CALLERS: dict[str, type[AioCaller] | type[SyncCaller]] = {"aio": AioCaller, "sync": SyncCaller}
