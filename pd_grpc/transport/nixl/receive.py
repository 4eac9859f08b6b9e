"""D's half of nixl: takes writers in, says where each grant lies, and counts what is said to have
been written."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.transport.base import NotUsable, ReceiveSide, ReceiveTransport, WriterNews
from pd_grpc.transport.nixl.acceptor import Acceptor
from pd_grpc.transport.nixl.agent import Region, require
from pd_grpc.transport.one_sided import check_written, compare
from pd_grpc.v1 import layout_pb2, nixl_pb2, transfer_pb2

WINDOW_BYTES = 16 << 20
"""Four chunks, so that some are under way while others are told of."""


class NixlReceive(ReceiveTransport):
    """A pool that is registered with an agent for each P. A P that has one can write anywhere in
    it; ours writes to the blocks of its grants alone."""

    def __init__(self, side: ReceiveSide) -> None:
        """NotUsable without the library, and when the pool is not in the host's memory."""
        address = side.memory.host_address
        if address is None:
            raise NotUsable("the engine's pool is not in host memory")
        require()
        self._memory = side.memory.stored
        size = side.memory.num_blocks * side.layout.block_bytes
        self._acceptor = Acceptor(Region(address, size), side.host)

    def metadata(self) -> bytes:
        """See `ReceiveTransport.metadata`."""
        return self._acceptor.shard.SerializeToString()

    def target(self, runs: Sequence[tuple[int, Sequence[int]]]) -> layout_pb2.MemoryDescriptor:
        """See `ReceiveTransport.target`."""
        target = nixl_pb2.NixlTarget(
            runs=[nixl_pb2.NixlRun(start=start, blocks=blocks) for start, blocks in runs]
        )
        return layout_pb2.MemoryDescriptor(
            kind=layout_pb2.TRANSPORT_NIXL, handle=target.SerializeToString()
        )

    def window_bytes(self, configured: int) -> int:
        """See `ReceiveTransport.window_bytes`: what is unacknowledged lies in the pool already."""
        return max(configured, WINDOW_BYTES)

    async def start(self, news: WriterNews) -> None:
        """See `ReceiveTransport.start`."""
        await self._acceptor.start(news)

    async def stop(self) -> None:
        """See `ReceiveTransport.stop`."""
        await self._acceptor.stop()

    def land(
        self,
        chunk: transfer_pb2.KvChunk,
        payload: memoryview,
        blocks: Sequence[int],
        fresh: bool,
        audited: bool,
    ) -> None:
        """See `ReceiveTransport.land`. The bytes are in place before the chunk is sent."""
        pool_id = self._acceptor.shard.pool_id
        check_written(chunk, payload, layout_pb2.TRANSPORT_NIXL, pool_id)
        # What was audited once is not again: D may be decoding from it, and writes to its own.
        if audited and fresh:
            compare(self._memory, chunk, blocks)
