"""D's half of shm: lends the pool out, says where each grant lies in it, and counts what is said to
have been written."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.protocol.faults import bad_request
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.transport.base import NotUsable, ReceiveSide, ReceiveTransport, WriterNews
from pd_grpc.transport.chunk_codec import checksum
from pd_grpc.transport.chunks import corrupt
from pd_grpc.transport.shm.lender import Lender
from pd_grpc.v1 import layout_pb2, shm_pb2, transfer_pb2


class ShmReceive(ReceiveTransport):
    """A pool in shared memory. A P of the same user that has it can write anywhere in it; ours
    writes to the blocks of its grants alone."""

    def __init__(self, side: ReceiveSide) -> None:
        """NotUsable when the pool is not in shared memory."""
        fd = side.memory.shared_fd
        if fd is None:
            raise NotUsable("the engine's pool is not in shared memory")
        self._memory = side.memory
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
        wrong = []
        if payload.nbytes:
            wrong.append(FieldError("chunk.payload", "must be empty: the bytes are in the pool"))
        descriptor = chunk.descriptor
        if descriptor.kind != layout_pb2.TRANSPORT_SHM:
            wrong.append(FieldError("chunk.descriptor.kind", "must be the grant's transport"))
        if descriptor.device:
            wrong.append(FieldError("chunk.descriptor.device", "must be 0: the pool is the host's"))
        if descriptor.handle != self._lender.shard.pool_id:
            wrong.append(FieldError("chunk.descriptor.handle", "names no memory of this shard"))
        if wrong:
            raise bad_request(wrong)
        # What was audited once is not again: D may be decoding from it, and writes to its own.
        if audited and fresh:
            layers = chunk.layer_start, chunk.layer_count
            if checksum(self._memory.read(blocks, chunk.group, *layers)) != chunk.crc32c:
                raise corrupt(chunk)
