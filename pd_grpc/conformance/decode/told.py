"""What D tells a P of the kit's on its sessions, kept as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from pd_grpc.conformance.case import within
from pd_grpc.v1 import decode_pb2, types_pb2

T = TypeVar("T")


class Told:
    """By kind, so that a look costs the same however much D has said."""

    def __init__(self) -> None:
        self.load: decode_pb2.Load | None = None
        """The last on the newest session."""
        self._ends: list[decode_pb2.TransferEnded] = []
        self._first: dict[str, Any] = {}
        self._acks: dict[int, decode_pb2.HeartbeatAck] = {}
        self._acked = 0
        self._loads: dict[int, decode_pb2.Load] = {}
        self._more = asyncio.Event()

    def begin(self) -> None:
        """A session begins: heartbeats are numbered anew, and D tells its load again."""
        self.load = None
        self._acked = 0
        self._acks.clear()
        self._loads.clear()

    def add(self, message: decode_pb2.SessionResponse) -> None:
        """D said this."""
        kind = message.WhichOneof("message")
        if kind is not None:
            self._first.setdefault(kind, getattr(message, kind))
        if kind == "heartbeat_ack":
            self._acked = message.heartbeat_ack.sequence
            self._acks[self._acked] = message.heartbeat_ack
        elif kind == "load":
            self.load = self._loads[self._acked] = message.load
        elif kind == "transfer_ended":
            self._ends.append(message.transfer_ended)
        self._more.set()

    def first(self, kind: str) -> Any:
        """The first message of a kind, such as "drain", on any session; None before it has come."""
        return self._first.get(kind)

    def end_of(self, ref: types_pb2.TransferRef) -> decode_pb2.TransferEnded | None:
        """What was told first of a transfer's end, on any session; None before that."""
        return next((end for end in self._ends if end.ref == ref), None)

    def ack(self, sequence: int) -> decode_pb2.HeartbeatAck | None:
        """The ack of a heartbeat of the newest session; None before it has come."""
        return self._acks.get(sequence)

    def load_with(self, ack: decode_pb2.HeartbeatAck) -> decode_pb2.Load:
        """The load that D told last before the next ack."""
        told = [sequence for sequence in self._loads if sequence <= ack.sequence]
        return self._loads[max(told)] if told else decode_pb2.Load()

    async def once(self, look: Callable[[], T | None], what: str, limit_s: float | None) -> T:
        """What `look` finds here, as soon as it is not None. Broken when it has not come in time;
        None is `answer_s`."""

        async def found() -> T:
            while (seen := look()) is None:
                self._more.clear()
                await self._more.wait()
            return seen

        return await within(limit_s, found(), what)
