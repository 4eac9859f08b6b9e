"""P's half of shm: writes each slab where D has it, and then says so in a chunk without bytes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from pd_grpc.engine.base import KvMemory
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.unforeseen import defect
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
from pd_grpc.transport.one_sided import granted_blocks, not_reached, where
from pd_grpc.transport.shm.borrower import borrow
from pd_grpc.transport.shm.copying import Copier, Copying
from pd_grpc.transport.shm.mapping import Attachment
from pd_grpc.v1 import layout_pb2, shm_pb2, transfer_pb2, types_pb2

SLAB_BYTES = 128 << 20
"""A chunk costs either end the same however much it is about: of 32 and 64 MiB to a chunk, 256 MiB
went at 8.1 and 9.6 GiB/s, and at 2.6 of 1 MiB (the legs of `pd-grpc bench kv`, two busy cores). Two
of these are in D's window, so that one is copied while D is told of the other."""

LEAST_BYTES = 8 << 20
"""Copied within some milliseconds, and no more than that is left to copy when a pass is over. Each
slab costs P and D processor time, which on a machine whose cores all compute is the pass's: 1,024
tokens of SmolLM2 on two threads of P took 28 ms more to the first token than in one D, and 109 to
122 where a slab went from 1 MiB on (medians of 10 on two cores)."""


@dataclass
class _Pool:
    """A shard's pool as it is mapped here, and the process of D that it is of."""

    attachment: Attachment
    decode: types_pb2.Instance


@dataclass(eq=False)
class _Borrowing:
    """A pool that is on its way; it is sent back if its shard is forgotten before it comes."""

    endpoint: str
    forgotten: bool = False


class ShmTransport(CallTransport):
    """Streams to shards whose pool is mapped here. A mapping keeps the memory of a D that is gone,
    so that it ends with the last use, and when a newer process of that D is reached."""

    def __init__(self, side: SendSide) -> None:
        """NotUsable where there is no memory to share."""
        if sys.platform != "linux":
            raise NotUsable("only Linux has memory to share of this kind")
        super().__init__(side.make_channel)
        self._side = side
        self._pools: dict[str, _Pool] = {}
        """By the shard's endpoint."""
        self._borrowing: set[_Borrowing] = set()
        self._copier = Copier()

    def least_bytes(self, chunk_bytes: int) -> int:
        """See `SendTransport.least_bytes`."""
        return max(chunk_bytes, LEAST_BYTES)

    def slab_bytes(self, chunk_bytes: int) -> int:
        """See `SendTransport.slab_bytes`."""
        return max(chunk_bytes, SLAB_BYTES)

    async def reach(self, shards: Sequence[layout_pb2.Shard], decode: types_pb2.Instance) -> None:
        """See `SendTransport.reach`: map the pool of every shard that is not."""
        self._outlive(decode)
        for shard in shards:
            try:
                pool = shm_pb2.ShmShard.FromString(shard.transport_metadata)
            except DecodeError as error:
                raise Unreachable("the shard's transport_metadata is no ShmShard") from error
            known = self._pools.get(shard.endpoint)
            if known is None or known.attachment.pool_id != pool.pool_id:
                await self._borrow(shard.endpoint, pool, decode)

    def forget(self, endpoint: str) -> None:
        """Let go of the pool too, once no stream writes to it."""
        super().forget(endpoint)
        for each in self._borrowing:
            each.forgotten = each.forgotten or each.endpoint == endpoint
        self._replace(endpoint, None)

    async def stop(self) -> None:
        """Let go of every pool."""
        for endpoint in {*self._pools, *(each.endpoint for each in self._borrowing)}:
            self.forget(endpoint)
        self._copier.close()
        await super().stop()

    def _outlive(self, decode: types_pb2.Instance) -> None:
        """Let go of the pools of earlier processes of a D, wherever their shards were."""
        for endpoint, pool in list(self._pools.items()):
            if pool.decode.name == decode.name and pool.decode.epoch < decode.epoch:
                self._replace(endpoint, None)

    async def _borrow(
        self, endpoint: str, shard: shm_pb2.ShmShard, decode: types_pb2.Instance
    ) -> None:
        borrowing = _Borrowing(endpoint)
        self._borrowing.add(borrowing)
        try:
            attachment = await borrow(shard, self._side.instance, self._side.layout)
        finally:
            self._borrowing.discard(borrowing)
        if borrowing.forgotten:
            attachment.forget()
            raise Unreachable("the shard was forgotten before its pool came")
        self._replace(endpoint, _Pool(attachment, decode))

    def _replace(self, endpoint: str, pool: _Pool | None) -> None:
        before = self._pools.pop(endpoint, None)
        if before is not None:
            before.attachment.forget()
        if pool is not None:
            self._pools[endpoint] = pool

    def _stream(
        self,
        endpoint: str,
        call: TransferCall,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
    ) -> SendStream:
        pool = self._pools.get(endpoint)
        attachment = None if pool is None else pool.attachment
        # D's pool has the order of ours, or it would not have chosen this transport.
        stored = self._side.memory.stored
        return ShmStream(call, message, listener, stored, attachment, self._copier)


class ShmStream(CallStream):
    """One Transfer call, and the right to write to the blocks of its grant until it has ended and
    nothing of it is being copied any more: until then the pool stays mapped."""

    def __init__(
        self,
        call: TransferCall,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
        memory: KvMemory,
        attachment: Attachment | None,
        copier: Copier,
    ) -> None:
        super().__init__(call, message, listener)
        self._memory = memory
        self._attachment = attachment
        self._copier = copier
        self._blocks: Mapping[int, int] = {}
        self._audit = False
        self._copyings: set[Copying] = set()
        self._told: asyncio.Task[bool] | None = None
        """Of the last slab: D was told of it and of all before."""
        self._failed: BaseException | None = None
        if attachment is not None:
            attachment.hold()
            self._reader.add_done_callback(lambda _: attachment.release())

    def _take_target(self, opened: transfer_pb2.TransferOpened) -> None:
        if self._attachment is None:
            raise not_reached()
        self._blocks = granted_blocks(
            opened,
            layout_pb2.TRANSPORT_SHM,
            lambda handle: shm_pb2.ShmTarget.FromString(handle).runs,
            self._attachment.mapping.num_blocks,
        )
        self._audit = opened.audit

    async def write(self, slab: Slab, blocks: Sequence[int]) -> bool:
        """See `SendStream.write`. It is copied meanwhile, and D is told afterwards."""
        if self._ended:
            return False
        attachment = self._attachment
        assert attachment is not None, "nothing is sent before the target is known"
        pieces = self._memory.read(blocks, slab.group, slab.layer, slab.layers)
        to = where(slab, self._blocks)
        copies = attachment.mapping.copies(to, slab.group, slab.layer, slab.layers, pieces)
        header = chunk_of(slab, checksum(pieces) if self._audit else 0)
        header.descriptor.kind = layout_pb2.TRANSPORT_SHM
        header.descriptor.handle = attachment.pool_id
        copying = self._copier.start(self, copies)
        self._copyings.add(copying)
        attachment.hold()
        copying.over.add_done_callback(lambda _: self._copied(copying, attachment))
        telling = self._tell(self._told, copying, OutgoingChunk(header, ()))
        self._told = asyncio.create_task(telling, name="pd-shm-tell")
        return True

    def _copied(self, copying: Copying, attachment: Attachment) -> None:
        """Nothing of a slab is written any more; its views of the pool are gone."""
        self._copyings.discard(copying)
        attachment.release()
        self._failed = self._failed or copying.over.exception()
        if self._failed is not None:
            self._call.cancel()

    async def _tell(
        self, before: asyncio.Task[bool] | None, copying: Copying, chunk: OutgoingChunk
    ) -> bool:
        """Send the chunk of a slab that has been copied, all of it; one after the other."""
        await asyncio.wait([copying.over])
        told = before is None or await before
        return told and copying.copied and await self._send(chunk)

    async def end(self, chunks: int, payload_bytes: int) -> bool:
        """See `SendStream.end`."""
        if self._told is not None:
            await asyncio.wait([self._told])
            if not self._told.result():
                return False
        return await super().end(chunks, payload_bytes)

    async def _settle(self) -> bool:
        """See `CallStream._settle`: what is being copied is waited for, the rest is not begun."""
        await self._copier.stop(self._copyings)
        if self._told is not None:
            await asyncio.wait([self._told])
        return True

    def _reason(self, fault: Fault | TransportFault) -> Fault | TransportFault:
        return fault if self._failed is None else defect(self._failed, "KV could not be sent")
