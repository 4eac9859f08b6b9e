"""A server with a method of each shape, over words that are protobuf messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import StringValue

from pd_grpc.testing.faults import Injector
from pd_grpc.testing.faults_client import client_interceptors
from pd_grpc.testing.faults_server import FaultServerInterceptor

SERVICE = "test.Echo"


@dataclass
class Echo:
    """Says what it hears, and remembers it."""

    endpoint: str = ""
    heard: list[str] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def one(self, request: StringValue, context: Any) -> StringValue:
        self.heard.append(request.value)
        return StringValue(value=f"{request.value}!")

    async def count(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        self.heard.append(request.value)
        for n in range(3):
            yield StringValue(value=f"{request.value}{n}")

    async def gather(self, requests: AsyncIterator[StringValue], context: Any) -> StringValue:
        words = [request.value async for request in requests]
        self.heard += words
        return StringValue(value="+".join(words))

    async def talk(self, requests: AsyncIterator[StringValue], context: Any) -> None:
        try:
            async for request in requests:
                self.heard.append(request.value)
                await context.write(StringValue(value=f"{request.value}!"))
        finally:
            self.ended.set()


def _handlers(echo: Echo) -> grpc.GenericRpcHandler[Any, Any]:
    codec = StringValue.FromString, StringValue.SerializeToString
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "One": grpc.unary_unary_rpc_method_handler(echo.one, *codec),
            "Count": grpc.unary_stream_rpc_method_handler(echo.count, *codec),
            "Gather": grpc.stream_unary_rpc_method_handler(echo.gather, *codec),
            "Talk": grpc.stream_stream_rpc_method_handler(echo.talk, *codec),
        },
    )


class Caller:
    """Calls it on a channel of either kind."""

    def __init__(self, channel: Any) -> None:
        def stub(shape: str, name: str) -> Any:
            method = f"/{SERVICE}/{name}"
            codec = StringValue.SerializeToString, StringValue.FromString
            return getattr(channel, shape)(method, *codec)

        self.one = stub("unary_unary", "One")
        self.count = stub("unary_stream", "Count")
        self.gather = stub("stream_unary", "Gather")
        self.talk = stub("stream_stream", "Talk")

    async def counted(self, word: str, timeout: float = 5) -> list[str]:
        """Every answer of Count."""
        return [m.value async for m in self.count(StringValue(value=word), timeout=timeout)]

    async def talked(self, *words: str, timeout: float = 5) -> list[str]:
        """Every answer to words said one by one, without a wait for the answers."""
        call = self.talk(timeout=timeout)
        for word in words:
            await call.write(StringValue(value=word))
        await call.done_writing()
        return [m.value async for m in call]


@asynccontextmanager
async def echoing(
    at_server: Injector | None = None, at_client: Injector | None = None
) -> AsyncIterator[tuple[Echo, Caller]]:
    """The server and a caller, with an injector at either end."""
    echo = Echo()
    interceptors = [] if at_server is None else [FaultServerInterceptor(at_server)]
    server = grpc.aio.server(interceptors=interceptors, options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((_handlers(echo),))
    echo.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    between = () if at_client is None else client_interceptors(at_client)
    try:
        async with grpc.aio.insecure_channel(echo.endpoint, interceptors=between) as channel:
            yield echo, Caller(channel)
    finally:
        await server.stop(0)
