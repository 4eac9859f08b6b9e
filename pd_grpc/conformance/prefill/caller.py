"""The kit as the router: a call of Prefill, and what P says of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pd_grpc.conformance.calls import Stream, check_fault
from pd_grpc.conformance.case import broken, expect
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.faults import Fault, Reason, TransportFault
from pd_grpc.v1 import prefill_pb2


class Caller:
    """A Prefill call, and the events that have come."""

    def __init__(self, call: Any, transcript: Transcript) -> None:
        self.stream = Stream(call, "Prefill", transcript)
        self.events: list[prefill_pb2.PrefillResponse] = []

    @property
    def kinds(self) -> list[str]:
        """The kinds of the events so far."""
        return [event.WhichOneof("event") or "none" for event in self.events]

    async def event(self, kind: str, seconds: float | None = None) -> Any:
        """Read on until an event of this kind; the event."""
        while True:
            event = await self.stream.read(f"{kind} from Prefill", seconds)
            self._note(event)
            if event.HasField(kind):
                return getattr(event, kind)

    async def handed_off(self, seconds: float | None = None) -> prefill_pb2.HandedOff:
        """Read to the end, which must be OK after handed_off."""
        await self._read_on(seconds)
        await self.stream.fine("the request was handed off", seconds)
        expect(bool(self.events), "handed_off before the end", "no event")
        last = self.events[-1]
        expect(last.HasField("handed_off"), "handed_off as the last event", last)
        return last.handed_off

    async def fails(self, reason: Reason, what: str, seconds: float | None = None) -> Fault:
        """Read to the end, which must be this fault with the table's code, and no hand-off."""
        fault = check_fault(await self.ends(seconds), reason, what)
        expect("handed_off" not in self.kinds, "no handed_off before a fault", self.kinds)
        return fault

    async def ends(self, seconds: float | None = None) -> Fault | TransportFault | None:
        """Read to the end; how it ended, None for OK."""
        await self._read_on(seconds)
        return await self.stream.outcome(seconds)

    async def no_hand_off(self, seconds: float, why: str) -> None:
        """Broken when handed_off comes, or the call ends, within so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                event = await asyncio.wait_for(self.stream.wait_for_message(), left)
            except asyncio.TimeoutError:
                return
            if event is None:
                broken(f"Prefill still open: {why}", await self.stream.ended())
            self._note(event)
            expect(not event.HasField("handed_off"), f"no handed_off: {why}", event)

    async def leave(self) -> None:
        """The caller goes."""
        await self.stream.leave()

    async def _read_on(self, seconds: float | None) -> None:
        what = "the next event of Prefill or its end"
        while (event := await self.stream.next(what, seconds)) is not None:
            self._note(event)

    def _note(self, event: Any) -> None:
        if not isinstance(event, prefill_pb2.PrefillResponse):
            broken("a PrefillResponse", event)
        self.events.append(event)
