"""D's half of shm: lends the pool out, says where each grant lies in it, and counts what is said to
have been written."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.transport.base import NotUsable, ReceiveSide, ReceiveTransport, WriterNews
from pd_grpc.transport.one_sided import check_written, compare
from pd_grpc.transport.shm.lender import Lender
from pd_grpc.v1 import layout_pb2, shm_pb2, transfer_pb2

WINDOW_BYTES = 256 << 20
"""So much that P never waits for an ack: several chunks may be under way while D looks at one."""


class ShmReceive(ReceiveTransport):
    """A pool in shared memory. A P of the same user that has it can write anywhere in it; ours
    writes to the blocks of its grants alone."""

    def __init__(self, side: ReceiveSide) -> None:
        """NotUsable when the pool is not in shared memory."""
        fd = side.memory.shared_fd
        if fd is None:
            raise NotUsable("the engine's pool is not in shared memory")
        self._memory = side.memory.stored
        self._lender = Lender(fd, side.memory.num_blocks * side.layout.block_bytes)

    def metadata(self) -> bytes:
        """See `ReceiveTransport.metadata`."""
        return self._lender.shard.SerializeToString()

    def target(self, runs: Sequence[tuple[int, Sequence[int]]]) -> layout_pb2.MemoryDescriptor:
        """See `ReceiveTransport.target`."""
        target = shm_pb2.ShmTarget(
            runs=[shm_pb2.ShmRun(start=start, blocks=blocks) for start, blocks in runs]
        )
        return layout_pb2.MemoryDescriptor(
            kind=layout_pb2.TRANSPORT_SHM, handle=target.SerializeToString()
        )

    def window_bytes(self, configured: int) -> int:
        """See `ReceiveTransport.window_bytes`: what is unacknowledged lies in the pool already."""
        return max(configured, WINDOW_BYTES)

    async def start(self, news: WriterNews) -> None:
        """See `ReceiveTransport.start`."""
        self._lender.start(news)

    async def stop(self) -> None:
        """See `ReceiveTransport.stop`."""
        await self._lender.stop()

    def land(
        self,
        chunk: transfer_pb2.KvChunk,
        payload: memoryview,
        blocks: Sequence[int],
        fresh: bool,
        audited: bool,
    ) -> None:
        """See `ReceiveTransport.land`. The bytes are in place before the chunk is sent."""
        check_written(chunk, payload, layout_pb2.TRANSPORT_SHM, self._lender.shard.pool_id)
        # What was audited once is not again: D may be decoding from it, and writes to its own.
        if audited and fresh:
            compare(self._memory, chunk, blocks)
