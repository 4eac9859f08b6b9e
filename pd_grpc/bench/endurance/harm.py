"""Doing the harm that a plan has in it, and putting it right."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from pd_grpc.bench.endurance.detection import Harm
from pd_grpc.bench.endurance.fleet import ROUTER, Fleet
from pd_grpc.bench.endurance.links import Link
from pd_grpc.bench.endurance.plan import NOTICED_FROM_S, FaultKind, PlannedFault

_CHUNK_COMES_S = 1.5
"""How long a chunk to be spoiled is waited for."""
_LOOK_S = 0.01


@dataclass
class Harmer:
    """Harms a fleet with links, one thing at a time."""

    fleet: Fleet
    now_wrong: str = ""
    """What is wrong at present, in words."""
    done: Counter[FaultKind] = field(default_factory=Counter)
    noticeable: list[Harm] = field(default_factory=list)
    """What the router ought to have noticed."""
    held_after_drain: int = 0
    """Blocks that did not come back by the end of a drain."""

    async def do(self, fault: PlannedFault) -> None:
        """Do it and put it right; returns when the router takes every instance for ready again.
        WorkerLost."""
        began_at = time.monotonic()
        about = f"from {fault.client}" if fault.client else ""
        self.now_wrong = " ".join(filter(None, (fault.kind.value, fault.target, about, fault.port)))
        done, noticeable = True, False
        if fault.kind is FaultKind.KILL:
            await self.fleet.kill(fault.target)
            await asyncio.sleep(fault.lasts_s)
            await self.fleet.bring_back(fault.target)
            noticeable = True
        elif fault.kind is FaultKind.RESTART:
            self.held_after_drain += await self.fleet.drain(fault.target, fault.lasts_s)
            await self.fleet.bring_back(fault.target)
            noticeable = True
        elif fault.kind is FaultKind.STOP:
            self.fleet.freeze(fault.target)
            await asyncio.sleep(fault.lasts_s)
            self.fleet.thaw(fault.target)
            noticeable = fault.lasts_s >= NOTICED_FROM_S
        elif fault.kind is FaultKind.CUT:
            done = await self._cut(fault)
            long = not fault.lasts_s or fault.lasts_s >= NOTICED_FROM_S
            noticeable = done and fault.client == ROUTER and long
        else:
            done = await self._corrupt(fault)
        await self.fleet.until_ready()
        self.done[fault.kind] += done
        if noticeable:
            self.noticeable.append(Harm(fault.target, began_at, self.now_wrong))
        self.now_wrong = ""

    async def _cut(self, fault: PlannedFault) -> bool:
        """Whether there was a connection to be cut."""
        link = self._link(fault.target, fault.port)
        if not fault.lasts_s:
            return link.reset(fault.client) > 0
        connections = link.cut(fault.client)
        await asyncio.sleep(fault.lasts_s)
        link.heal(fault.client)
        return connections > 0

    async def _corrupt(self, fault: PlannedFault) -> bool:
        """Whether a chunk has come that could be spoiled."""
        link = self._link(fault.target, "bulk")
        link.to_spoil = fault.chunks
        until = time.monotonic() + _CHUNK_COMES_S
        while link.to_spoil and time.monotonic() < until:  # noqa: ASYNC110 - a link tells nobody
            await asyncio.sleep(_LOOK_S)
        spoiled = link.to_spoil < fault.chunks
        link.to_spoil = 0
        return spoiled

    def _link(self, name: str, port: str) -> Link:
        return self.fleet.units[name].links[port]
