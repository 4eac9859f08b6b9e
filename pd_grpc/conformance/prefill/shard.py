"""A shard of the kit's D: it takes KV in as transfer.proto has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from pd_grpc.conformance.prefill.grant import Grant
from pd_grpc.conformance.prefill.step import Refused, Step, refusing
from pd_grpc.conformance.request import replaced
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import transfer_pb2, transfer_pb2_grpc

WINDOW_BYTES = 8 << 20


class Steps:
    """The steps of every Transfer to one D, over all its shards."""

    def __init__(self, transcript: Transcript) -> None:
        self.open: Step[transfer_pb2.TransferOpen] = Step("Transfer", transcript)
        self.chunk: Step[transfer_pb2.KvChunk] = Step("Transfer", transcript)
        """`hold` keeps D from verifying and so from acknowledging; chunks are read all the same."""
        self.end: Step[transfer_pb2.TransferEnd] = Step("Transfer", transcript)
        self.window_bytes = WINDOW_BYTES

    def go(self) -> None:
        """Let everything pass."""
        for step in (self.open, self.chunk, self.end):
            step.go()


class IncomingKv:
    """One Transfer call as D sees it."""

    def __init__(self, open_: transfer_pb2.TransferOpen, shard: int) -> None:
        self.open = open_
        self.shard = shard
        self.answered = False
        """Whether opened has been sent."""
        self.listed: list[transfer_pb2.KvRange] = []
        """What opened said was verified already."""
        self.opens = 1
        self.early = False
        """Whether a chunk or end came before that."""
        self.chunks: list[transfer_pb2.KvChunk] = []
        self.bytes = 0
        self.accepted = 0
        self.end: transfer_pb2.TransferEnd | None = None
        self.ended = asyncio.Event()
        self.excess = 0
        """The most bytes that were unacknowledged with more than one chunk under way."""

    def came(self, message: transfer_pb2.TransferRequest) -> None:
        """Note a message as it arrives."""
        self.early = self.early or not self.answered
        if message.HasField("chunk"):
            self.chunks.append(message.chunk)
            under_way = self.bytes - self.accepted
            self.bytes += len(message.chunk.payload)
            if under_way:
                self.excess = max(self.excess, self.bytes - self.accepted)
        elif message.HasField("end"):
            self.end = message.end
        else:
            self.opens += 1


class ShardService(transfer_pb2_grpc.TransferServiceServicer):
    """Serves Transfer for one shard. `find` gives the grant that an open means, or Fault."""

    def __init__(
        self,
        shard: int,
        steps: Steps,
        streams: list[IncomingKv],
        find: Callable[[transfer_pb2.TransferOpen], Grant],
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._streams = streams
        self._find = find

    async def Transfer(
        self,
        request_iterator: AsyncIterator[transfer_pb2.TransferRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        first = await anext(request_iterator, None)
        if first is None:
            return
        stream = IncomingKv(first.open, self._shard)
        self._streams.append(stream)
        queue: asyncio.Queue[transfer_pb2.TransferRequest | None] = asyncio.Queue()
        reader = asyncio.create_task(_read(request_iterator, stream, queue))
        try:
            async with refusing(context):
                await self._serve(stream, first, queue, context)
        finally:
            stream.ended.set()
            reader.cancel()

    async def _serve(
        self,
        stream: IncomingKv,
        first: transfer_pb2.TransferRequest,
        queue: asyncio.Queue[transfer_pb2.TransferRequest | None],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        if not first.HasField("open"):
            raise Refused(Fault(Reason.WRONG_STATE, "open comes first", {"state": "no open"}))
        await self._steps.open.take(first.open)
        grant = self._granted(first.open)
        opened = transfer_pb2.TransferOpened(
            verified=grant.verified(self._shard), window_bytes=self._steps.window_bytes
        )
        stream.answered = True
        stream.listed = list(opened.verified)
        await _say(context, opened=replaced(opened, self._steps.open.answer))
        while (message := await queue.get()) is not None:
            if message.HasField("chunk"):
                await self._take(stream, grant, message.chunk, context)
            elif message.HasField("end"):
                await self._end(stream, grant, message.end, context)
                return

    def _granted(self, open_: transfer_pb2.TransferOpen) -> Grant:
        try:
            grant = self._find(open_)
        except Fault as fault:
            raise Refused(fault) from None
        if grant.response.shards and open_.shard_index != self._shard:
            raise Refused(bad_request([FieldError("shard_index", f"this is {self._shard}")]))
        return grant

    async def _take(
        self,
        stream: IncomingKv,
        grant: Grant,
        chunk: transfer_pb2.KvChunk,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await self._steps.chunk.take(chunk)
        try:
            stored = grant.store(self._shard, chunk)
        except Fault as fault:
            raise Refused(fault) from None
        stream.accepted += len(chunk.payload)
        ack = transfer_pb2.TransferAck(ranges=[stored], accepted_bytes=stream.accepted)
        await _say(context, ack=ack)

    async def _end(
        self,
        stream: IncomingKv,
        grant: Grant,
        end: transfer_pb2.TransferEnd,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await self._steps.end.take(end)
        if (end.chunks, end.bytes) != (len(stream.chunks), stream.bytes):
            raise Refused(bad_request([FieldError("end", "sums that are not the stream's")]))
        if grant.missing(self._shard):
            raise Refused(bad_request([FieldError("end", "ranges that were wanted are missing")]))
        done = transfer_pb2.TransferCompleted(chunks=end.chunks, bytes=end.bytes)
        await _say(context, completed=done)


async def _say(context: grpc.aio.ServicerContext[Any, Any], **message: Any) -> None:
    await context.write(transfer_pb2.TransferResponse(**message))


async def _read(
    requests: AsyncIterator[transfer_pb2.TransferRequest],
    stream: IncomingKv,
    queue: asyncio.Queue[transfer_pb2.TransferRequest | None],
) -> None:
    async for message in requests:
        stream.came(message)
        queue.put_nowait(message)
    queue.put_nowait(None)
