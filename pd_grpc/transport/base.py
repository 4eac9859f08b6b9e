"""What a transport is: how the KV of one transfer gets from P's memory to one shard of D.

The policy (what is ready, what D wants, how much may be in flight) is P's sender's and D's
receiver's and knows no transport; a transport moves the slabs it is told to and says what has
become of them. A new one is one module for P and one for D.

On P it goes in this order: `open`, then `opened` is heard, any number of `write`s with `acked`
heard between them, `end`, and `completed` is heard; or `broken`, once, at any time. `close` may
come at any time, and when it returns the transport reads P's memory no more, and no write of it can
land in D's: what a one-sided transport fences for, and `inline` has for nothing, since D does the
writing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.v1 import transfer_pb2


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
    """What one shard of D is to get from one request.

    `tokens` are computed in all, `block_table` lists P's physical blocks in logical order, `wanted`
    the runs of logical blocks (start, count) that D lacks, `layers` the layers the shard holds. The
    KV of the first `ready` tokens is in P's memory from the beginning.
    """

    tokens: int
    block_table: tuple[int, ...]
    wanted: tuple[tuple[int, int], ...]
    layers: tuple[LayerRun, ...]
    ready: int = 0


class StreamListener(Protocol):
    """Who hears of one stream. Called on the loop the stream was opened on; after `completed` or
    `broken` nothing follows."""

    def opened(self, verified: Sequence[Slab], window_bytes: int) -> None:
        """The shard knows the grant, has these slabs already and lets this many payload bytes be
        unacknowledged."""

    def acked(self, ranges: Sequence[Slab], accepted_bytes: int) -> None:
        """These slabs are in place; `accepted_bytes` on this stream so far."""

    def completed(self) -> None:
        """The shard has everything."""

    def broken(self, fault: Fault | TransportFault) -> None:
        """The stream has ended otherwise."""


class SendStream(ABC):
    """One stream of KV to one shard."""

    @abstractmethod
    async def write(self, slab: Slab, blocks: Sequence[int]) -> bool:
        """Send a slab that lies in the physical `blocks`, whose memory is read before anything is
        waited for. False once the stream has ended; why it has, the listener hears."""

    @abstractmethod
    async def end(self, chunks: int, payload_bytes: int) -> bool:
        """Say that everything has been sent, and how much that was. False as for `write`."""

    @abstractmethod
    async def finished(self) -> None:
        """After `completed` or `broken`: wait until the stream is gone."""

    @abstractmethod
    async def close(self) -> None:
        """Stop. When it returns P's memory is not read and D's not written any more, and the
        listener hears nothing further."""


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

    @abstractmethod
    def forget(self, endpoint: str) -> None:
        """Nothing more goes to `endpoint`: give back what reaching it took."""

    @abstractmethod
    async def stop(self) -> None:
        """Give everything back; no stream is open any more."""
