"""The router's requests in flight, by the client's name for them and by transfer, and how the last
ones ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pd_grpc.protocol.admin import ChangeFeed
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.tombstones import Tombstones
from pd_grpc.v1 import admin_pb2, types_pb2


class Described(Protocol):
    """A request in flight as an operator may see it and end it."""

    @property
    def key(self) -> TransferKey:
        """Its transfer, with the current attempt."""
        ...

    def info(self) -> admin_pb2.TransferInfo:
        """How it stands."""
        ...

    def fail(self, fault: Fault) -> None:
        """End it with a fault."""
        ...


class InFlight:
    """Refuses a second request of one name, lists those that run, remembers those that ended."""

    def __init__(self, config: RouterConfig, clock: Clock, changes: ChangeFeed) -> None:
        self._clock = clock
        self._changes = changes
        self._names: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: dict[str, Described] = {}
        self._ended: Tombstones[admin_pb2.TransferInfo] = Tombstones(
            config.tombstone_s, config.tombstones
        )
        self.ended_counts: Counter[types_pb2.TransferState] = Counter()
        self.late_events = 0
        """What a leg said too late, or again, and so changed nothing."""

    @contextmanager
    def named(self, request_id: str) -> Iterator[None]:
        """Hold a request's name. Fault DUPLICATE_REQUEST while another request holds it."""
        if request_id in self._names:
            text = f"request_id {request_id!r} is in flight"
            raise Fault(Reason.DUPLICATE_REQUEST, text, {"request_id": request_id})
        self._names.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._names.discard(request_id)
            if not self._names:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def __len__(self) -> int:
        return len(self._names)

    def running(self) -> list[Described]:
        """Requests with legs, oldest first."""
        return list(self._running.values())

    def add(self, request: Described) -> None:
        """A request has been sent to its instances."""
        self._running[request.key.transfer_id] = request
        self.changed(request)

    def changed(self, request: Described) -> None:
        """Its state is another one."""
        if self._changes.watched:
            self._changes.publish(request.info())

    def remove(self, request: Described) -> None:
        """It has ended."""
        del self._running[request.key.transfer_id]
        info = request.info()
        self.ended_counts[info.state] += 1
        self._ended.add(request.key, info, self._clock.now())
        self._changes.publish(info)

    def find(self, transfer_id: str, attempt: int) -> Described | None:
        """A running request; attempt 0 is whichever it is at."""
        request = self._running.get(transfer_id)
        if request is None or attempt not in (0, request.key.attempt):
            return None
        return request

    def ended(self, transfer_id: str, attempt: int) -> admin_pb2.TransferInfo | None:
        """How a request ended, while it is remembered; attempt 0 is the newest."""
        now = self._clock.now()
        wanted = attempt or self._ended.newest(transfer_id, now)
        return self._ended.get(TransferKey(transfer_id, wanted), now)
