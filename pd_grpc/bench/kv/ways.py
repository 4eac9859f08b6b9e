"""The ways to move KV that are compared. A transport that is built is one entry more."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pd_grpc.bench.kv.pool import KvPool

Tables = Sequence[Sequence[int]]
"""For each transfer its physical blocks in logical order."""


class Landing(Protocol):
    """The receiver's end; with `lands` false nothing is put into its pool."""

    lands: bool

    async def start(self, pool: KvPool, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Listen; what the sender must know."""
        ...

    async def expect(self, names: Sequence[str], tables: Tables) -> None:
        """Let transfers of these names in."""
        ...

    async def landed(self) -> None:
        """Wait until all of them are in place. RuntimeError when one is not going to be."""
        ...

    async def stop(self) -> None:
        """End everything."""
        ...


class Sending(Protocol):
    """The sender's end."""

    async def start(
        self, pool: KvPool, settings: Mapping[str, Any], address: Mapping[str, Any]
    ) -> None:
        """Get ready to send to who said `address`."""
        ...

    async def send(self, names: Sequence[str], tables: Tables) -> list[float]:
        """Send all at once; of each, the seconds until the receiver has said that it has it."""
        ...

    async def stop(self) -> None:
        """End everything."""
        ...


@dataclass(frozen=True)
class Way:
    """One way; `module` has its ends as `Landing` and `Sending`."""

    module: str
    description: str
    lands: bool = True
    """Whether the bytes are put into the receiver's memory, where they can be looked at."""

    def landing(self) -> Landing:
        """The receiver's end."""
        made: Landing = importlib.import_module(self.module).Landing(self.lands)
        return made

    def sending(self) -> Sending:
        """The sender's end."""
        made: Sending = importlib.import_module(self.module).Sending()
        return made


_HERE = "pd_grpc.bench.kv"
TRANSPORTS: Mapping[str, Way] = {
    "inline": Way(
        f"{_HERE}.inline",
        "P's BulkSender and D's BulkServer and Receiver as the servers have them: chunks with "
        "crc32c, acknowledged when they are in D's pool",
    ),
}
"""Ours; any number of transfers at once, contiguous and fragmented."""
BASELINES: Mapping[str, Way] = {
    "memcpy": Way(f"{_HERE}.memcpy", "torch's copy_ of one tensor to another, in the sender"),
    "tcp": Way(f"{_HERE}.tcp", "a socket: sendall from the pool, recv_into the pool"),
    "zmq": Way(
        f"{_HERE}.zero_mq",
        "PUSH/PULL over TCP, copy off, messages of 1 MiB; the receiver copies each into the pool",
    ),
    "bare_grpc": Way(
        f"{_HERE}.bare_grpc",
        "a grpc.aio byte stream of 1 MiB messages with identity serializers: bytes made from the "
        "pool, copied into the pool, nothing checked and nothing acknowledged but the end",
    ),
    "zmq_dropped": Way(f"{_HERE}.zero_mq", "as zmq, but what comes is dropped", lands=False),
    "bare_grpc_dropped": Way(
        f"{_HERE}.bare_grpc", "as bare_grpc, but what comes is dropped", lands=False
    ),
}
"""What others would do; one transfer of one run of memory. All keep what malloc frees."""
WAYS: Mapping[str, Way] = {**TRANSPORTS, **BASELINES}
