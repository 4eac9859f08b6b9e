"""P's half of a Transfer call, whatever its chunks carry."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import grpc.aio

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.transport.base import SendStream, SendTransport, Slab, StreamListener
from pd_grpc.transport.chunk_codec import TRANSFER_METHOD, OutgoingChunk, serialize_request
from pd_grpc.v1 import transfer_pb2

LAST_WORD_S = 1.0
"""How long the status of a call that has ended may still be on its way."""

TransferCall: TypeAlias = grpc.aio.StreamStreamCall[bytes, transfer_pb2.TransferResponse]


@dataclass(eq=False)
class _Connection:
    """The way to one endpoint, and who waits for the end of each stream that goes by it."""

    channel: grpc.aio.Channel
    streams: set[asyncio.Task[None]] = field(default_factory=set)


class CallTransport(SendTransport):
    """Streams to any endpoint, one connection for each. To be used on one loop."""

    def __init__(self, make_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._make_channel = make_channel
        self._connections: dict[str, _Connection] = {}
        self._forgotten: set[_Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def open(
        self,
        endpoint: str,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
        timeout_s: float,
        metadata: Sequence[tuple[str, str]],
    ) -> SendStream:
        """See `SendTransport.open`."""
        connection = self._connections.get(endpoint)
        if connection is None:
            connection = _Connection(self._make_channel(endpoint))
            self._connections[endpoint] = connection
        # Requests come serialized: grpc would do it after a wait, and then the blocks may be gone.
        transfer: Any = connection.channel.stream_stream(
            TRANSFER_METHOD,
            request_serializer=None,
            response_deserializer=transfer_pb2.TransferResponse.FromString,
        )
        call = transfer(timeout=timeout_s, metadata=tuple(metadata))
        stream = self._stream(endpoint, call, message, listener)
        ending = asyncio.create_task(stream.finished())
        connection.streams.add(ending)
        ending.add_done_callback(partial(self._ended, connection))
        return stream

    @abstractmethod
    def _stream(
        self,
        endpoint: str,
        call: TransferCall,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
    ) -> SendStream:
        """The stream over a call that has begun."""

    def forget(self, endpoint: str) -> None:
        """Close the connection, if there is one, after its last stream."""
        connection = self._connections.pop(endpoint, None)
        if connection is None:
            return
        if connection.streams:
            self._forgotten.add(connection)
        else:
            self._close(connection)

    async def stop(self) -> None:
        """Close every connection."""
        connections = {*self._connections.values(), *self._forgotten}
        self._connections.clear()
        self._forgotten.clear()
        for connection in connections:
            self._close(connection)
        streams = [ending for connection in connections for ending in connection.streams]
        await asyncio.gather(*self._closing, *streams)

    def _ended(self, connection: _Connection, ending: asyncio.Task[None]) -> None:
        connection.streams.discard(ending)
        if connection in self._forgotten and not connection.streams:
            self._forgotten.discard(connection)
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        task = asyncio.create_task(connection.channel.close(None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class CallStream(SendStream):
    """One Transfer call."""

    def __init__(
        self, call: TransferCall, message: transfer_pb2.TransferOpen, listener: StreamListener
    ) -> None:
        self._call = call
        self._listener = listener
        self._ended = False
        self._end_said = False
        self._last_word = _LastWord(call)
        self._reader = asyncio.create_task(self._converse(message), name="pd-transfer")

    async def _begin(self) -> None:
        """Before the call's first message: get what the stream needs besides. Fault or
        TransportFault, which break the stream, when that cannot be had."""

    def _take_target(self, opened: transfer_pb2.TransferOpened) -> None:
        """D has answered. Fault when its answer cannot be used."""

    async def _settle(self) -> bool:
        """The stream has ended; may be asked again. When it returns P's memory is not read any
        more. Whether it has stopped, as for `close`."""
        return True

    def _reason(self, fault: Fault | TransportFault) -> Fault | TransportFault:
        """What has broken the stream, where the call ended with `fault`."""
        return fault

    async def end(self, chunks: int, payload_bytes: int) -> bool:
        """See `SendStream.end`."""
        self._end_said = True
        end = transfer_pb2.TransferEnd(chunks=chunks, bytes=payload_bytes)
        return await self._send(transfer_pb2.TransferRequest(end=end))

    async def finished(self) -> None:
        """See `SendStream.finished`."""
        await asyncio.wait([self._reader])

    async def close(self) -> bool:
        """See `SendStream.close`: cancel the call, and wait for what is under way besides."""
        self._ended = True
        self._call.cancel()
        # A call that is cancelled before it has begun leaves whoever writes to it waiting for ever.
        self._reader.cancel()
        await asyncio.wait([self._reader])
        return await self._settle()

    async def _send(self, message: transfer_pb2.TransferRequest | OutgoingChunk) -> bool:
        """Write unless the call has ended; why it has is the reader's to tell."""
        try:
            if not self._ended:
                await self._call.write(serialize_request(message))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        except asyncio.CancelledError:
            # grpc raises it in a write whose call was cancelled, by `close`. Otherwise it is the
            # task that writes which was cancelled.
            if not self._ended:
                raise
            return False
        return not self._ended

    async def _converse(self, message: transfer_pb2.TransferOpen) -> None:
        fault: Fault | TransportFault
        try:
            await self._begin()
            await self._send(transfer_pb2.TransferRequest(open=message))
            async for response in self._call:
                if not self._ended:
                    self._hear(response)
            fault = TransportFault(Code.UNAVAILABLE, "the stream ended before it was complete")
        except grpc.aio.AioRpcError as error:
            fault = await self._last_word.of(error)
        except asyncio.CancelledError:
            fault = TransportFault(Code.CANCELLED, "the stream was cancelled")
        except (Fault, TransportFault) as error:
            self._call.cancel()
            fault = error
        if not self._ended:
            self._ended = True
            reason = self._reason(fault)
            # Whoever hears of it may open another, to write to the same blocks.
            stopped = await self._settle()
            self._listener.broken(reason, stopped)

    def _hear(self, response: transfer_pb2.TransferResponse) -> None:
        """Fault when the shard says what it must not."""
        kind = response.WhichOneof("message")
        if kind == "opened":
            opened = response.opened
            self._take_target(opened)
            self._listener.opened(_slabs(opened.verified), opened.window_bytes)
        elif kind == "ack":
            self._listener.acked(_slabs(response.ack.ranges), response.ack.accepted_bytes)
        elif kind == "completed":
            # The end is said after the last write. Before it some may be under way, and whoever
            # hears that it is complete uses the blocks for something else.
            if not self._end_said:
                text = "the shard says that it has everything before it was told the end"
                raise Fault(Reason.WRONG_STATE, text, {"state": "completed"})
            self._ended = True
            self._listener.completed()


class _LastWord:
    """The status that the peer ended a call with.

    Where a write was under way, grpc.aio puts INTERNAL in its place, before it has come or after.
    It calls back for each status, so the peer's own can be kept.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._told = asyncio.Event()
        self._error: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    async def of(self, error: grpc.aio.AioRpcError) -> Fault | TransportFault:
        """What ended the call, which raised `error`. When the peer's word does not come the stream
        is lost, and the peer says it again when it is opened again."""
        fault = rpc.read_error(error)
        if isinstance(fault, Fault) or fault.code is not Code.INTERNAL:
            return fault
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._told.wait(), LAST_WORD_S)
        if self._error is None or self._error.code() is grpc.StatusCode.OK:
            return TransportFault(Code.UNAVAILABLE, "the stream ended while it was written to")
        return rpc.read_error(self._error)

    def _note(self, call: grpc.aio.Call) -> None:
        reading = _status_of(call)
        try:
            reading.send(None)
        except StopIteration as read:
            error: grpc.aio.AioRpcError = read.value
            if error.code() is not grpc.StatusCode.INTERNAL or error.trailing_metadata():
                self._error = error
                self._told.set()
        finally:
            reading.close()


async def _status_of(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    """The status of a call that has one, for which nothing is waited for."""
    code, details = await call.code(), await call.details()
    trailing = await call.trailing_metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None)


def _slabs(ranges: Iterable[transfer_pb2.KvRange]) -> list[Slab]:
    return [
        Slab(r.group, r.layer_start, r.layer_count, r.block_start, r.block_count) for r in ranges
    ]
