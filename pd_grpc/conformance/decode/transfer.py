"""One Transfer of the kit's to a shard of D."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import grpc.aio

from pd_grpc.conformance.calls import Stream
from pd_grpc.conformance.case import answer_s, expect, expect_equal
from pd_grpc.conformance.channels import connect
from pd_grpc.conformance.request import BUDGET_S, replaced
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import decode_pb2, transfer_pb2, transfer_pb2_grpc, types_pb2


class Transfer:
    """A Transfer call: chunks go in, acks come out."""

    def __init__(self, channel: grpc.aio.Channel, transcript: Transcript) -> None:
        stub = transfer_pb2_grpc.TransferServiceStub(transcript.channel(channel))
        self.stream = Stream(stub.Transfer(timeout=BUDGET_S), "Transfer", transcript)
        self._channel = channel
        self.chunks = 0
        self.bytes = 0

    async def offer_open(
        self, ref: types_pb2.TransferRef, session_id: str, grant_id: str, /, **fields: Any
    ) -> None:
        """Say which grant it serves; `fields` replace those of the message."""
        message = transfer_pb2.TransferOpen(session_id=session_id, ref=ref, grant_id=grant_id)
        await self.stream.offer(transfer_pb2.TransferRequest(open=replaced(message, fields)))

    async def opened(self) -> transfer_pb2.TransferOpened:
        """D's answer to open."""
        message: transfer_pb2.TransferResponse = await self.stream.read("opened")
        expect(message.HasField("opened"), "opened as the first message", message)
        return message.opened

    async def send(self, chunk: transfer_pb2.KvChunk) -> None:
        """Send a chunk."""
        await self.stream.send(transfer_pb2.TransferRequest(chunk=chunk))
        self.chunks += 1
        self.bytes += len(chunk.payload)

    async def offer(self, chunk: transfer_pb2.KvChunk) -> None:
        """Send a chunk that D may be about to refuse."""
        await self.stream.offer(transfer_pb2.TransferRequest(chunk=chunk))

    async def ack(self, seconds: float | None = None) -> transfer_pb2.TransferAck:
        """The next ack."""
        message: transfer_pb2.TransferResponse = await self.stream.read("an ack", seconds)
        expect(message.HasField("ack"), "an ack", message)
        return message.ack

    async def acknowledged(self, upto_bytes: int) -> list[transfer_pb2.KvRange]:
        """Every range acknowledged until that many bytes have been accepted."""
        ranges: list[transfer_pb2.KvRange] = []
        until = time.monotonic() + 4 * answer_s()
        while True:
            ack = await self.ack()
            ranges += ack.ranges
            if ack.accepted_bytes >= upto_bytes:
                return ranges
            expect(time.monotonic() < until, f"{upto_bytes} bytes accepted", ack)

    async def send_all(self, chunks: Sequence[transfer_pb2.KvChunk]) -> list[transfer_pb2.KvRange]:
        """Send chunks and wait until all are acknowledged; returns the ranges."""
        ranges: list[transfer_pb2.KvRange] = []
        for chunk in chunks:
            await self.send(chunk)
            ranges += await self.acknowledged(self.bytes)
        return ranges

    async def end(self, chunks: int | None = None, bytes_: int | None = None) -> None:
        """Say that everything has been sent; the sums are the true ones unless given."""
        end = transfer_pb2.TransferEnd(
            chunks=self.chunks if chunks is None else chunks,
            bytes=self.bytes if bytes_ is None else bytes_,
        )
        await self.stream.offer(transfer_pb2.TransferRequest(end=end))

    async def complete(self) -> None:
        """End it; D must say that it has everything, and the call must end with OK."""
        await self.end()
        message: transfer_pb2.TransferResponse = await self.stream.read("completed")
        expect(message.HasField("completed"), "completed as the answer to end", message)
        expect_equal(message.completed.chunks, self.chunks, "completed.chunks")
        expect_equal(message.completed.bytes, self.bytes, "completed.bytes")
        await self.stream.fine("the transfer is complete")

    async def refused(self, reason: Reason, what: str, seconds: float | None = None) -> Fault:
        """How it must end."""
        return await self.stream.refused(reason, what, seconds)

    async def leave(self) -> None:
        """The sender goes, without a word."""
        await self.stream.leave()
        await self._channel.close(None)


def connect_transfer(grant: decode_pb2.AllocateResponse, transcript: Transcript) -> Transfer:
    """A Transfer to a grant's first shard, on a connection of its own, with nothing said yet."""
    channel = connect(grant.shards[0].endpoint)
    return Transfer(channel, transcript)
