"""P's half of nixl: writes each slab where D has it, and says so once it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError

from pd_grpc.protocol.endpoints import split_address
from pd_grpc.protocol.faults import Code, Fault, TransportFault
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
from pd_grpc.transport.nixl.agent import require
from pd_grpc.transport.nixl.link import Link, attach
from pd_grpc.transport.one_sided import granted_blocks, not_reached, where
from pd_grpc.v1 import layout_pb2, nixl_pb2, transfer_pb2, types_pb2

SLAB_BYTES = 4 << 20
"""Of 1, 4, 8 and 16 MiB to a chunk, with four of them in the window, 256 MiB went at 1.6, 2.1, 1.9
and 2.1 GiB/s (the legs of `pd-grpc bench kv` over TCP on one host, two busy cores)."""
SETTLE_S = 1.0
"""How long a stream that stops waits for its writes before it ends the link with them."""


class NixlTransport(CallTransport):
    """Streams to shards that can be written to through NIXL."""

    def __init__(self, side: SendSide) -> None:
        """NotUsable without the library, and when P's pool is not in the host's memory."""
        if side.memory.host_address is None:
            raise NotUsable("the engine's pool is not in host memory")
        require()
        super().__init__(side.make_channel)
        self._side = side
        self._reaches: dict[str, Reach] = {}
        self._left: set[asyncio.Task[None]] = set()

    def slab_bytes(self, chunk_bytes: int) -> int:
        """See `SendTransport.slab_bytes`."""
        return max(chunk_bytes, SLAB_BYTES)

    async def reach(self, shards: Sequence[layout_pb2.Shard], decode: types_pb2.Instance) -> None:
        """See `SendTransport.reach`: attach to every shard that one is not."""
        for shard in shards:
            try:
                about = nixl_pb2.NixlShard.FromString(shard.transport_metadata)
            except DecodeError as error:
                raise Unreachable("the shard's transport_metadata is no NixlShard") from error
            known = self._reaches.get(shard.endpoint)
            if known is None or known.shard.pool_id != about.pool_id:
                self._leave(shard.endpoint)
                known = Reach(shard.endpoint, about, self._side)
                self._reaches[shard.endpoint] = known
            await known.link()

    def forget(self, endpoint: str) -> None:
        """Detach too, once no stream writes there."""
        super().forget(endpoint)
        self._leave(endpoint)

    async def stop(self) -> None:
        """Detach from every shard."""
        for endpoint in list(self._reaches):
            self._leave(endpoint)
        while self._left:
            await asyncio.wait(list(self._left))
        await super().stop()

    def _leave(self, endpoint: str) -> None:
        reach = self._reaches.pop(endpoint, None)
        if reach is not None:
            task = asyncio.create_task(reach.leave(), name="pd-nixl-leave")
            self._left.add(task)
            task.add_done_callback(self._left.discard)

    def _stream(
        self,
        endpoint: str,
        call: TransferCall,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
    ) -> SendStream:
        return NixlStream(call, message, listener, self._side, self._reaches.get(endpoint))


class Reach:
    """How one shard is written to: by one link after another, should one fail."""

    def __init__(self, endpoint: str, shard: nixl_pb2.NixlShard, side: SendSide) -> None:
        self.shard = shard
        self._host = split_address(endpoint)[0]
        self._side = side
        self._link: Link | None = None
        self._one_at_a_time = asyncio.Lock()
        self._left = False

    async def link(self) -> Link:
        """One that is alive. Unreachable when there is none to be had."""
        async with self._one_at_a_time:
            if self._link is not None and not self._link.alive:
                # Whether what is under way there may land does not matter: before D makes the
                # agent of the next it destroys that of this one.
                await self._link.ended()
                self._link = None
            if self._left:
                raise Unreachable("the shard is not written to any more")
            if self._link is None:
                self._link = await attach(self._host, self.shard, self._side)
            return self._link

    async def leave(self) -> None:
        """Nothing more is written there: end the link after its last stream."""
        self._left = True
        async with self._one_at_a_time:
            link = self._link
        if link is not None:
            link.forget()
            await link.ended()


class NixlStream(CallStream):
    """One Transfer call, and the right to write to the blocks of its grant until it has ended. It
    keeps to one link: when that ends, so does the stream, and the next has another."""

    def __init__(
        self,
        call: TransferCall,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
        side: SendSide,
        reach: Reach | None,
    ) -> None:
        self._side = side
        self._reach = reach
        self._link: Link | None = None
        self._blocks: Mapping[int, int] = {}
        self._audit = False
        self._told: asyncio.Task[bool] | None = None
        """Of the last slab: D was told of it and of all before."""
        self._lost: TransportFault | None = None
        self._stopped = True
        super().__init__(call, message, listener)

    async def _begin(self) -> None:
        if self._reach is None:
            raise not_reached()
        try:
            self._link = await self._reach.link()
        except Unreachable as error:
            raise TransportFault(Code.UNAVAILABLE, str(error)) from error
        self._link.hold()

    def _take_target(self, opened: transfer_pb2.TransferOpened) -> None:
        assert self._link is not None, "a call begins with it"
        self._blocks = granted_blocks(
            opened,
            layout_pb2.TRANSPORT_NIXL,
            lambda handle: nixl_pb2.NixlTarget.FromString(handle).runs,
            self._link.num_blocks,
        )
        self._audit = opened.audit

    async def write(self, slab: Slab, blocks: Sequence[int]) -> bool:
        """See `SendStream.write`."""
        if self._ended:
            return False
        link = self._link
        assert link is not None, "nothing is sent before the target is known"
        pieces = self._side.memory.stored.read(blocks, slab.group, slab.layer, slab.layers)
        to = where(slab, self._blocks)
        header = chunk_of(slab, checksum(pieces) if self._audit else 0)
        header.descriptor.kind = layout_pb2.TRANSPORT_NIXL
        header.descriptor.handle = link.pool_id
        landed = link.write(blocks, to, slab.group, slab.layer, slab.layers)
        telling = self._tell(self._told, landed, OutgoingChunk(header, ()))
        self._told = asyncio.create_task(telling, name="pd-nixl-tell")
        return True

    async def _tell(
        self, before: asyncio.Task[bool] | None, landed: asyncio.Future[bool], chunk: OutgoingChunk
    ) -> bool:
        """Send the chunk of a slab that has landed; one after the other."""
        told = before is None or await before
        if not await landed:
            return self._lose()
        return told and await self._send(chunk)

    async def end(self, chunks: int, payload_bytes: int) -> bool:
        """See `SendStream.end`."""
        link = self._link
        assert link is not None, "nothing is sent before the target is known"
        if self._told is not None:
            await asyncio.wait([self._told])
            if not self._told.result():
                return False
        # An earlier stream of the same grant may have left some.
        if not await link.quiet():
            return self._lose()
        return await super().end(chunks, payload_bytes)

    def _lose(self) -> bool:
        """The link has ended, and with it the stream."""
        self._lost = TransportFault(Code.UNAVAILABLE, "the way into D's memory was lost")
        self._call.cancel()
        return False

    async def _settle(self) -> bool:
        """See `CallStream._settle`: every write has landed, or its link has ended."""
        link, told = self._link, self._told
        if link is None:
            return self._stopped
        if told is not None:
            await asyncio.wait([told], timeout=SETTLE_S)
            if not told.done():
                await link.end()
                await asyncio.wait([told])
        if self._link is not None:
            self._link = None
            self._stopped = self._lost is None or link.stopped
            link.release()
        return self._stopped

    def _reason(self, fault: Fault | TransportFault) -> Fault | TransportFault:
        return self._lost or fault
