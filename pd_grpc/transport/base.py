"""What a transport is: how the KV of one transfer gets from P's memory to one shard of D.

The policy (what is ready, what D wants, how much may be in flight) is P's sender's and D's
receiver's and knows no transport; a transport moves the slabs it is told to and says what has
become of them. A new one is one module or package, whose `TRANSPORT` names both halves; it is found
by its name (`registry`), and nothing else changes.

What D offers goes into the metadata of its shard (`ReceiveTransport.metadata`), and P says whether
that gets it there (`SendTransport.reach`) before it asks for blocks. What D grants goes into the
answer to a stream's open (`target`). Each chunk that comes is taken in by `land`. A one-sided
transport also tells D which processes can write to its memory (`start`): while one can, the blocks
of its ended transfers are not granted again, unless it says that it has stopped.

On P it goes in this order: `open`, then `opened` is heard, any number of `write`s with `acked`
heard between them, `end`, and `completed` is heard; or `broken`, once, at any time. `close` may
come at any time, and when it returns the transport reads P's memory no more. Whether a write of it
can yet land in D's it says besides: what a one-sided transport fences for, and `inline` has for
nothing, since D does the writing. P never says that it has stopped where that is not known; then D
keeps the blocks until it has ended the way to them by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pd_grpc.engine.base import KvMemory
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.v1 import layout_pb2, transfer_pb2, types_pb2

if TYPE_CHECKING:  # the machines know slabs and plans, and no gRPC
    import grpc.aio


class Slab(NamedTuple):
    """A rectangle of KV: layers `[layer, layer + layers)` of `group` for the logical blocks
    `[block, block + blocks)`."""

    group: int
    layer: int
    layers: int
    block: int
    blocks: int


class LayerRun(NamedTuple):
    """Layers `[layer, layer + layers)` of a group."""

    group: int
    layer: int
    layers: int


@dataclass(frozen=True)
class SendPlan:
    """What one shard of D is to get of one request from one shard of P.

    `tokens` are computed in all, `block_table` lists P's physical blocks in logical order, `wanted`
    the runs of logical blocks (start, count) that D lacks, `layers` the layers that go to it, each
    with `heads` of the model's heads; 0 is all. The KV of the first `ready` tokens is in P's memory
    from the beginning.
    """

    tokens: int
    block_table: tuple[int, ...]
    wanted: tuple[tuple[int, int], ...]
    layers: tuple[LayerRun, ...]
    ready: int = 0
    heads: int = 0


class StreamListener(Protocol):
    """Who hears of one stream. Called on the loop the stream was opened on; after `completed` or
    `broken` nothing follows."""

    def opened(self, verified: Sequence[Slab], window_bytes: int) -> None:
        """The shard knows the grant, has these slabs already and lets this many payload bytes be
        unacknowledged."""

    def acked(self, ranges: Sequence[Slab], accepted_bytes: int) -> None:
        """These slabs are in place; `accepted_bytes` on this stream so far."""

    def completed(self) -> None:
        """The shard has everything, after the stream's `end`, so that no write is under way."""

    def broken(self, fault: Fault | TransportFault, stopped: bool = True) -> None:
        """The stream has ended otherwise; `stopped` is as for `SendStream.close`."""


class SendStream(ABC):
    """One stream of KV to one shard."""

    @abstractmethod
    async def write(self, slab: Slab, blocks: Sequence[int]) -> bool:
        """Send a slab that lies in the physical `blocks`, whose memory may be read until the slab
        is acknowledged, `broken` is heard or `close` has returned. False once the stream has ended;
        why it has, the listener hears."""

    @abstractmethod
    async def end(self, chunks: int, payload_bytes: int) -> bool:
        """Say that everything has been sent, and how much that was. False as for `write`."""

    @abstractmethod
    async def finished(self) -> None:
        """After `completed` or `broken`: wait until the stream is gone."""

    @abstractmethod
    async def close(self) -> bool:
        """Stop. When it returns, within a bounded time, P's memory is not read any more, and the
        listener hears nothing further. Whether it has stopped: true when none of its writes can
        land in D's memory any more, false when that is not known."""


class SendTransport(ABC):
    """P's half of one way to move KV."""

    @abstractmethod
    def open(
        self,
        endpoint: str,
        message: transfer_pb2.TransferOpen,
        listener: StreamListener,
        timeout_s: float,
        metadata: Sequence[tuple[str, str]],
    ) -> SendStream:
        """Begin a stream to the shard at `endpoint`; at once, what follows is heard."""

    def least_bytes(self, chunk_bytes: int) -> int:
        """The smallest slab worth being sent while more of a pass is to come, where one of
        `chunk_bytes` was asked for."""
        return chunk_bytes

    def slab_bytes(self, chunk_bytes: int) -> int:
        """The largest slab worth a chunk, where one of `chunk_bytes` was asked for."""
        return chunk_bytes

    async def reach(  # noqa: B027 - what goes wherever gRPC goes has nothing to prove
        self, shards: Sequence[layout_pb2.Shard], decode: types_pb2.Instance
    ) -> None:
        """Get ready to write to these shards of `decode`. Unreachable when that cannot be."""

    @abstractmethod
    def forget(self, endpoint: str) -> None:
        """Nothing more goes to `endpoint`: give back what reaching it took, once no stream to it is
        open any more."""

    @abstractmethod
    async def stop(self) -> None:
        """Give everything back; no stream is open any more."""


WriterNews = Callable[[str, int, bool], None]
"""Hears that the process (name, epoch) can write to D's memory, or that it cannot any more: True,
False."""


class ReceiveTransport(ABC):
    """D's half of one way to move KV, for one shard. All of it is used on the shard's own loop."""

    @abstractmethod
    def land(
        self,
        chunk: transfer_pb2.KvChunk,
        payload: memoryview,
        blocks: Sequence[int],
        fresh: bool,
        audited: bool,
    ) -> None:
        """Take in a chunk for physical `blocks` of the pool, whose ranges and size are right:
        verify it, and if it is `fresh` see to it that its bytes are in place. Not fresh means that
        they are already, and must not be written again. Fault when it is wrong, and then the pool
        is as it was."""

    def metadata(self) -> bytes:
        """What P needs to reach this shard; empty for none."""
        return b""

    def target(
        self, runs: Sequence[tuple[int, Sequence[int]]]
    ) -> layout_pb2.MemoryDescriptor | None:
        """Where the sender of a grant is to write: for each run of logical blocks its first one and
        the physical ones. None when D does the writing."""
        return None

    def window_bytes(self, configured: int) -> int:
        """What a stream may have unacknowledged, where one whose bytes pile up in memory may have
        `configured`."""
        return configured

    async def start(self, news: WriterNews) -> None:  # noqa: B027 - inline has nothing to start
        """Begin to take writers in."""

    async def stop(self) -> None:  # noqa: B027 - as `start`
        """Give everything back."""


class Unreachable(Exception):
    """This transport does not get P to that D; the message says why."""


class NotUsable(Exception):
    """This transport cannot be used here at all; the message says why."""


@dataclass(frozen=True)
class SendSide:
    """What P's half of a transport may build on."""

    instance: types_pb2.Instance
    layout: KvLayout
    memory: KvMemory
    make_channel: Callable[[str], grpc.aio.Channel]


@dataclass(frozen=True)
class ReceiveSide:
    """What D's half of a transport may build on."""

    layout: KvLayout
    memory: KvMemory
    host: str = "127.0.0.1"
    """Where the shard listens, for what listens beside it."""


@dataclass(frozen=True)
class TransportKind:
    """One way to move KV: its name in settings, spans and metrics, its value on the wire, whether P
    writes into D's memory itself, and its halves, either of which may raise NotUsable."""

    name: str
    value: int
    one_sided: bool
    send: Callable[[SendSide], SendTransport]
    receive: Callable[[ReceiveSide], ReceiveTransport]
