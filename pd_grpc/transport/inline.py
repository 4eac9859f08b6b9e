"""The inline transport: KV as bytes inside the chunks of a Transfer stream. D does the writing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio

from pd_grpc.engine.base import KvMemory
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.layout import CANONICAL
from pd_grpc.transport.base import (
    ReceiveSide,
    ReceiveTransport,
    SendSide,
    SendStream,
    Slab,
    StreamListener,
    TransportKind,
)
from pd_grpc.transport.call import CallStream, CallTransport, TransferCall
from pd_grpc.transport.chunk_codec import OutgoingChunk, checksum
from pd_grpc.transport.chunks import chunk_of, corrupt
from pd_grpc.v1 import layout_pb2, transfer_pb2


class InlineTransport(CallTransport):
    """P's half: goes wherever gRPC goes."""

    def __init__(self, memory: KvMemory, make_channel: Callable[[str], grpc.aio.Channel]) -> None:
        super().__init__(make_channel)
        self._memory = memory

    def _stream(
        self,
        endpoint: str,
        call: TransferCall,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
    ) -> SendStream:
        canonical = message.kv_format in ("", CANONICAL)
        memory = self._memory if canonical else self._memory.stored
        return InlineStream(call, message, listener, memory)


class InlineStream(CallStream):
    """One Transfer call. Nothing of ours lands in D's memory after its stream has gone."""

    def __init__(
        self,
        call: TransferCall,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
        memory: KvMemory,
    ) -> None:
        super().__init__(call, message, listener)
        self._memory = memory
        sends = message.sends
        self._heads = (sends.head_start, sends.head_count) if sends.head_count else None

    async def write(self, slab: Slab, blocks: Sequence[int]) -> bool:
        """See `SendStream.write`."""
        if self._ended:
            return False
        heads = self._heads
        pieces = self._memory.read(blocks, slab.group, slab.layer, slab.layers, heads)
        return await self._send(OutgoingChunk(chunk_of(slab, checksum(pieces), heads), pieces))


class InlineReceive(ReceiveTransport):
    """D's half: one copy, out of the message into the pool, once its checksum is right."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    def land(
        self,
        chunk: transfer_pb2.KvChunk,
        payload: memoryview,
        blocks: Sequence[int],
        fresh: bool,
        audited: bool,
    ) -> None:
        """See `ReceiveTransport.land`."""
        if chunk.HasField("descriptor"):
            text = "chunk.descriptor is not supported on a stream whose transport is INLINE"
            raise Fault(Reason.FEATURE, text, {"feature": "chunk.descriptor"})
        if checksum([payload]) != chunk.crc32c:
            raise corrupt(chunk)
        if fresh:
            layers = chunk.layer_start, chunk.layer_count
            heads = (chunk.head_start, chunk.head_count) if chunk.head_count else None
            self._memory.write(blocks, chunk.group, *layers, payload, heads)


def _send(side: SendSide) -> InlineTransport:
    return InlineTransport(side.memory, side.make_channel)


def _receive(side: ReceiveSide) -> InlineReceive:
    return InlineReceive(side.memory)


TRANSPORT = TransportKind("inline", layout_pb2.TRANSPORT_INLINE, False, _send, _receive)
