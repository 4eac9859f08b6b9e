"""Between two peers: every message that passes is read, may be changed, and goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from pd_grpc.v1 import admin_pb2, decode_pb2, inference_pb2, prefill_pb2, transfer_pb2

Edit = Callable[[Message], None]
"""Changes a message, the outermost one, in place; raises Cut to lose the connection instead."""

Context = grpc.aio.ServicerContext[bytes, bytes]
_NO_DEADLINE_S = 1e9
# What these declare is looked up by name.
_DECLARED = (admin_pb2, health_pb2, decode_pb2, inference_pb2, prefill_pb2, transfer_pb2)


class Cut(Exception):
    """The connection is lost instead of passing a message on."""


class Middleman(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it takes none at run time
    """Serves the methods of the services it has a way to; reached at its `endpoint`."""

    def __init__(self, ways: Mapping[str, str], read: Collection[str] | None = None) -> None:
        """`ways` leads from the name of a service to the endpoint that really serves it; of those
        not in `read` everything goes on as it is."""
        self.endpoint = ""
        self._read = ways.keys() if read is None else read
        self.edit: Edit = lambda message: None
        self._channels = {
            service: grpc.aio.insecure_channel(
                endpoint, options=[("grpc.use_local_subchannel_pool", 1)]
            )
            for service, endpoint in ways.items()
        }
        self._bulk = ways.get("TransferService", "")

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """The handler of a method, by its path."""
        path = str(handler_call_details.method)
        service, _, method = path.removeprefix("/").rpartition("/")
        channel = self._channels.get(service.rpartition(".")[2])
        if channel is None:
            return None
        found = descriptor_pool.Default().FindMethodByName(f"{service}.{method}")
        call = _Call(self, channel, path, found)
        if found.client_streaming:
            return grpc.stream_stream_rpc_method_handler(call.stream_stream)
        if found.server_streaming:
            return grpc.unary_stream_rpc_method_handler(call.unary_stream)
        return grpc.unary_unary_rpc_method_handler(call.unary_unary)

    def passed(self, raw: bytes, kind: type[Message], service: str) -> bytes:
        """A message as it goes on. KV goes through here as everything else does."""
        if service not in self._read:
            return raw
        message = kind.FromString(raw)
        self._lead_here(message)
        self.edit(message)
        return message.SerializeToString()

    def _lead_here(self, message: Message) -> None:
        if not self._bulk:
            return
        for inner in walk(message):
            if inner.DESCRIPTOR.name == "Shard" and inner.endpoint == self._bulk:  # type: ignore[attr-defined]
                inner.endpoint = self.endpoint  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Close the connections onward."""
        for channel in self._channels.values():
            await channel.close(None)


class _Call:
    """One method's way through."""

    def __init__(
        self, owner: Middleman, channel: grpc.aio.Channel, path: str, method: MethodDescriptor
    ) -> None:
        self._owner = owner
        self._channel = channel
        self._path = path
        self._service = method.containing_service.name
        self._asked = message_factory.GetMessageClass(method.input_type)
        self._answered = message_factory.GetMessageClass(method.output_type)

    async def unary_unary(self, request: bytes, context: Context) -> bytes:
        call: Any = self._channel.unary_unary(self._path, None, None)
        try:
            answer = await call(self._ask(request), **_terms(context))
        except grpc.aio.AioRpcError as error:
            await _pass_on(error, context)
        return self._answer(answer)

    async def unary_stream(self, request: bytes, context: Context) -> None:
        call: Any = self._channel.unary_stream(self._path, None, None)
        await self._relay(call(self._ask(request), **_terms(context)), context)

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        async def edited() -> AsyncIterator[bytes]:
            async for request in requests:
                yield self._ask(request)

        call: Any = self._channel.stream_stream(self._path, None, None)
        await self._relay(call(edited(), **_terms(context)), context)

    async def _relay(self, call: Any, context: Context) -> None:
        try:
            async for answer in call:
                await context.write(self._answer(answer))
        except grpc.aio.AioRpcError as error:
            await _pass_on(error, context)
        except Cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is lost")
        finally:
            call.cancel()

    def _ask(self, raw: bytes) -> bytes:
        return self._owner.passed(raw, self._asked, self._service)

    def _answer(self, raw: bytes) -> bytes:
        return self._owner.passed(raw, self._answered, self._service)


def walk(message: Message) -> list[Message]:
    """The message and every message of the protocol within it."""
    found = [message]
    for field, value in message.ListFields():
        entry = field.message_type
        if entry is None or entry.GetOptions().map_entry or entry.file.package != "pd_grpc.v1":
            continue
        for inner in value if field.is_repeated else [value]:
            found += walk(inner)
    return found


def _terms(context: Context) -> dict[str, Any]:
    left = context.time_remaining()
    trace = [(k, v) for k, v in context.invocation_metadata() or () if k == "traceparent"]
    return {
        "timeout": None if left is None or left > _NO_DEADLINE_S else left,
        "metadata": tuple(trace),
    }


async def _pass_on(error: grpc.aio.AioRpcError, context: Context) -> None:
    trailers: Any = error.trailing_metadata() or ()
    await context.abort(error.code(), error.details() or "", tuple(trailers))


@asynccontextmanager
async def between(
    ways: Mapping[str, str], read: Collection[str] | None = None
) -> AsyncIterator[Middleman]:
    """A middleman at work."""
    middleman = Middleman(ways, read)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((middleman,))
    middleman.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield middleman
    finally:
        await server.stop(0)
        await middleman.close()
