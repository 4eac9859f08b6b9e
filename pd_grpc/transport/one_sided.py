"""What the transports have in common by which P writes into D's memory itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from pd_grpc.engine.base import KvMemory
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.transport.base import Slab
from pd_grpc.transport.chunk_codec import checksum
from pd_grpc.transport.chunks import corrupt
from pd_grpc.v1 import layout_pb2, transfer_pb2

_STATE = {"state": "opened"}


class Run(Protocol):
    """Consecutive logical blocks of a target, from `start` on, and the pool's block for each."""

    @property
    def start(self) -> int: ...

    @property
    def blocks(self) -> Sequence[int]: ...


def granted_blocks(
    opened: transfer_pb2.TransferOpened,
    kind: layout_pb2.Transport,
    runs: Callable[[bytes], Iterable[Run]],
    num_blocks: int,
) -> dict[int, int]:
    """P's side: the pool's block for each logical block that may be written to, as D's answer has
    it in a handle that `runs` reads. Fault when that cannot be used: it is no target, or names a
    block outside D's pool of `num_blocks`."""
    target = opened.target
    if target.kind != kind or target.device:
        raise Fault(Reason.WRONG_STATE, "the shard did not say where to write", _STATE)
    try:
        found = {run.start + i: b for run in runs(target.handle) for i, b in enumerate(run.blocks)}
    except DecodeError as error:
        text = "opened.target has a handle that cannot be read"
        raise Fault(Reason.WRONG_STATE, text, _STATE) from error
    beyond = [block for block in found.values() if block >= num_blocks]
    if beyond:
        text = f"the shard grants block {beyond[0]}, which is outside its pool"
        raise Fault(Reason.WRONG_STATE, text, _STATE)
    return found


def where(slab: Slab, granted: Mapping[int, int]) -> list[int]:
    """P's side: the pool's block for each of a slab's. Fault, and nothing may be written, when D
    did not say where all of them lie."""
    wanted = range(slab.block, slab.block + slab.blocks)
    found = [granted[block] for block in wanted if block in granted]
    if len(found) < len(wanted):
        text = f"the shard did not say where all of blocks [{wanted.start}, {wanted.stop}) lie"
        raise Fault(Reason.WRONG_STATE, text, _STATE)
    return found


def not_reached() -> Fault:
    """P's side: a stream whose shard's memory P does not have."""
    return Fault(Reason.WRONG_STATE, "the shard's memory cannot be written to from here", _STATE)


def check_written(
    chunk: transfer_pb2.KvChunk, payload: memoryview, kind: layout_pb2.Transport, handle: bytes
) -> None:
    """D's side: BAD_REQUEST unless the chunk says that its bytes are in the memory `handle`."""
    wrong = []
    if payload.nbytes:
        wrong.append(FieldError("chunk.payload", "must be empty: the bytes are in the pool"))
    descriptor = chunk.descriptor
    if descriptor.kind != kind:
        wrong.append(FieldError("chunk.descriptor.kind", "must be the grant's transport"))
    if descriptor.device:
        wrong.append(FieldError("chunk.descriptor.device", "must be 0: the pool is the host's"))
    if descriptor.handle != handle:
        wrong.append(FieldError("chunk.descriptor.handle", "names no memory of this shard"))
    if wrong:
        raise bad_request(wrong)


def compare(memory: KvMemory, chunk: transfer_pb2.KvChunk, blocks: Sequence[int]) -> None:
    """D's side: KV_CORRUPT unless what lies in the pool has the chunk's checksum, as it lies."""
    layers = chunk.layer_start, chunk.layer_count
    if checksum(memory.read(blocks, chunk.group, *layers)) != chunk.crc32c:
        raise corrupt(chunk)
