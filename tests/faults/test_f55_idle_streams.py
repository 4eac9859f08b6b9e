"""F55: a proxy ends each stream on which one side says nothing for 2 s; heartbeats, which both
sides send, keep a Session alive through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import ServerConfig
from tests.prefill.cluster import answer_to, request_to, running
from tests.waiting import until

IDLE_S = 2.0
BEAT: dict[str, Any] = {"heartbeat_s": 0.6, "lease_s": 2.4}

Context = grpc.aio.ServicerContext[bytes, bytes]


class IdleProxy(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it takes none at run time
    """Passes every call on as a stream of bytes, and resets one that is idle in a direction."""

    def __init__(self, target: str) -> None:
        self.endpoint = ""
        self.reset: list[str] = []
        """The methods of the streams it has ended."""
        self.passed = 0
        """Messages of Session, both ways together."""
        self._channel = grpc.aio.insecure_channel(target)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """What passes a method's calls on."""
        method = str(handler_call_details.method)

        async def relay(requests: AsyncIterator[bytes], context: Context) -> None:
            await self._relay(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(relay)

    async def _relay(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        onward: Any = self._channel.stream_stream(method, None, None)
        call = onward(metadata=tuple(context.invocation_metadata() or ()))
        ways = [
            asyncio.create_task(self._pass(method, aiter(requests), call.write, call.done_writing)),
            asyncio.create_task(self._pass(method, aiter(call), context.write, None)),
        ]
        try:
            while pending := [way for way in ways if not way.done()]:
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if ways[1].done() or any(way.done() and way.exception() for way in ways):
                    break
            for way in ways:
                if way.done() and (error := way.exception()) is not None:
                    await self._end(method, error, context)
        finally:
            for way in ways:
                way.cancel()
            call.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(self, method: str, source: Any, write: Any, end: Any) -> None:
        while (message := await asyncio.wait_for(anext(source, None), IDLE_S)) is not None:
            self.passed += method.endswith("/Session")
            await write(message)
        if end is not None:
            await end()

    async def _end(self, method: str, error: BaseException, context: Context) -> None:
        if isinstance(error, asyncio.TimeoutError):
            self.reset.append(method.rpartition("/")[2])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "stream idle timeout")
        if isinstance(error, grpc.aio.AioRpcError):
            trailers: Any = error.trailing_metadata() or ()
            await context.abort(error.code(), error.details() or "", tuple(trailers))
        raise error

    async def close(self) -> None:
        """Close the connection onward."""
        await self._channel.close(None)


@asynccontextmanager
async def idle_proxy(target: str) -> AsyncIterator[IdleProxy]:
    """A proxy at work."""
    proxy = IdleProxy(target)
    # P's keepalive must pass: a server of other options ends the connection for too many pings.
    server = grpc.aio.server(options=rpc.server_options(ServerConfig()))
    server.add_generic_rpc_handlers((proxy,))
    proxy.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield proxy
    finally:
        await server.stop(0)
        await proxy.close()


async def test_heartbeats_both_ways_keep_a_session_alive_through_an_idle_timeout() -> None:
    async with running() as cluster:
        p, d = await cluster.prefill(**BEAT), await cluster.decode(**BEAT)
        async with idle_proxy(d.endpoint) as proxy:
            channel = cluster.channel(proxy.endpoint)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            reading = asyncio.ensure_future(watch.read())
            first = request_to(proxy.endpoint)
            assert (await cluster.run(p, d, first))[1].tokens == answer_to(first)
            (session,) = d.machine.ledger.sessions.live()
            # The silent stream was opened first, and is ended for it.
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await reading
            assert raised.value.details() == "stream idle timeout"
            assert proxy.reset == ["Watch"]
            passed = proxy.passed
            await until(lambda: proxy.passed >= passed + 4)
            assert d.machine.ledger.sessions.live() == [session], "one and the same"
            again = request_to(proxy.endpoint, random_seed=2)
            assert (await cluster.run(p, d, again))[1].tokens == answer_to(again)
            assert "Session" not in proxy.reset
            await cluster.stop(p)
