"""P's half of shm: writes each slab where D has it, and then says so in a chunk without bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError

from pd_grpc.engine.base import KvMemory
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.transport.base import (
    NotUsable,
    SendSide,
    SendStream,
    Slab,
    StreamListener,
    Unreachable,
)
from pd_grpc.transport.call import CallStream, CallTransport, TransferCall
from pd_grpc.transport.chunk_codec import OutgoingChunk, checksum
from pd_grpc.transport.chunks import chunk_of
from pd_grpc.transport.shm.borrower import borrow
from pd_grpc.transport.shm.mapping import Attachment
from pd_grpc.v1 import layout_pb2, shm_pb2, transfer_pb2, types_pb2


class ShmTransport(CallTransport):
    """Streams to shards whose pool is mapped here."""

    def __init__(self, side: SendSide) -> None:
        """NotUsable where there is no memory to share."""
        if sys.platform != "linux":
            raise NotUsable("only Linux has memory to share of this kind")
        super().__init__(side.make_channel)
        self._side = side
        self._attachments: dict[str, Attachment] = {}

    async def reach(self, shards: Sequence[layout_pb2.Shard], decode: types_pb2.Instance) -> None:
        """See `SendTransport.reach`: map the pool of every shard that is not."""
        for shard in shards:
            try:
                pool = shm_pb2.ShmShard.FromString(shard.transport_metadata)
            except DecodeError as error:
                raise Unreachable("the shard's transport_metadata is no ShmShard") from error
            known = self._attachments.get(shard.endpoint)
            if known is None or known.pool_id != pool.pool_id:
                attachment = await borrow(pool, self._side.instance, self._side.layout)
                self._replace(shard.endpoint, attachment)

    def forget(self, endpoint: str) -> None:
        """Let go of the pool too, once no stream writes to it."""
        super().forget(endpoint)
        self._replace(endpoint, None)

    async def stop(self) -> None:
        """Let go of every pool."""
        for endpoint in list(self._attachments):
            self._replace(endpoint, None)
        await super().stop()

    def _replace(self, endpoint: str, attachment: Attachment | None) -> None:
        before = self._attachments.pop(endpoint, None)
        if before is not None:
            before.forget()
        if attachment is not None:
            self._attachments[endpoint] = attachment

    def _stream(
        self,
        endpoint: str,
        call: TransferCall,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
    ) -> SendStream:
        attachment = self._attachments.get(endpoint)
        return ShmStream(call, message, listener, self._side.memory, attachment)


class ShmStream(CallStream):
    """One Transfer call, and the right to write to the blocks of its grant until it has ended."""

    def __init__(
        self,
        call: TransferCall,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
        memory: KvMemory,
        attachment: Attachment | None,
    ) -> None:
        super().__init__(call, message, listener)
        self._memory = memory
        self._attachment = attachment
        self._blocks: Mapping[int, int] = {}
        self._audit = False
        if attachment is not None:
            attachment.hold()
            # Once its reader has ended a stream writes no more; while it writes nobody else runs.
            self._reader.add_done_callback(lambda _: attachment.release())

    def _take_target(self, opened: transfer_pb2.TransferOpened) -> None:
        if self._attachment is None:
            raise Fault(Reason.WRONG_STATE, "the shard's memory is not mapped here", _STATE)
        target = opened.target
        if target.kind != layout_pb2.TRANSPORT_SHM or target.device:
            raise Fault(Reason.WRONG_STATE, "the shard did not say where to write", _STATE)
        try:
            runs = shm_pb2.ShmTarget.FromString(target.handle).runs
        except DecodeError as error:
            raise Fault(Reason.WRONG_STATE, "opened.target is no ShmTarget", _STATE) from error
        blocks = {run.start + i: block for run in runs for i, block in enumerate(run.blocks)}
        beyond = [b for b in blocks.values() if b >= self._attachment.mapping.num_blocks]
        if beyond:
            text = f"the shard grants block {beyond[0]}, which is outside its pool"
            raise Fault(Reason.WRONG_STATE, text, _STATE)
        self._blocks = blocks
        self._audit = opened.audit

    def _chunk(self, slab: Slab, blocks: Sequence[int]) -> OutgoingChunk:
        attachment = self._attachment
        assert attachment is not None, "nothing is sent before the target is known"
        pieces = self._memory.read(blocks, slab.group, slab.layer, slab.layers)
        # KeyError, and nothing is written, for a block that was not granted.
        to = [self._blocks[block] for block in range(slab.block, slab.block + slab.blocks)]
        attachment.mapping.write(to, slab.group, slab.layer, slab.layers, pieces)
        header = chunk_of(slab, checksum(pieces) if self._audit else 0)
        header.descriptor.kind = layout_pb2.TRANSPORT_SHM
        header.descriptor.handle = attachment.pool_id
        return OutgoingChunk(header, ())


_STATE = {"state": "opened"}
