"""The ways to move KV that are compared. A transport that is built is one entry more."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
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


class Sending(ABC):
    """The sender's end."""

    @abstractmethod
    async def start(
        self, pool: KvPool, settings: Mapping[str, Any], address: Mapping[str, Any]
    ) -> None:
        """Get ready to send to who said `address`."""

    @abstractmethod
    async def send(self, names: Sequence[str], tables: Tables) -> list[float]:
        """Send all at once; of each, the seconds until the receiver has said that it has it."""

    async def check(self, tables: Tables) -> None:  # noqa: B027 - what lands is looked at there
        """After `send`, outside of what is measured: RuntimeError when it did not do it."""

    @abstractmethod
    async def stop(self) -> None:
        """End everything."""


@dataclass(frozen=True)
class Way:
    """One way; `module` has its ends as `Landing` and `Sending`."""

    module: str
    description: str
    lands: bool = True
    """Whether the bytes are put into the receiver's memory, where they can be looked at."""
    arguments: tuple[Any, ...] = ()
    """For either end."""
    shared: bool = False
    """Whether the receiver's pool must lie in a memfd, as that of a D with this transport does."""

    def landing(self) -> Landing:
        """The receiver's end."""
        made: Landing = self._module.Landing(self.lands, *self.arguments)
        return made

    def sending(self) -> Sending:
        """The sender's end."""
        made: Sending = self._module.Sending(*self.arguments)
        return made

    @property
    def _module(self) -> Any:
        return importlib.import_module(self.module)


_HERE = "pd_grpc.bench.kv"
TRANSPORTS: Mapping[str, Way] = {
    "inline": Way(
        f"{_HERE}.ours",
        "P's BulkSender and D's BulkServer and Receiver as the servers have them: chunks with "
        "crc32c, acknowledged when they are in D's pool",
        arguments=("inline",),
    ),
    "shm": Way(
        f"{_HERE}.ours",
        "as inline, but P writes into D's pool, a memfd, itself, and the chunks say where",
        arguments=("shm",),
        shared=True,
    ),
    "nixl": Way(
        f"{_HERE}.ours",
        "as shm, but P writes through NIXL, whose UCX goes over TCP on one host without RDMA",
        arguments=("nixl",),
        shared=True,
    ),
}
"""Ours; any number of transfers at once, contiguous and fragmented."""
BASELINES: Mapping[str, Way] = {
    "memcpy": Way(
        f"{_HERE}.memcpy",
        "torch's copy_ of one tensor to another, in the sender, by as many threads as torch takes",
    ),
    "memcpy_one_thread": Way(f"{_HERE}.memcpy", "as memcpy, by one thread", arguments=(1,)),
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
