"""What is run: legs, in rounds, over pairs of processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from pd_grpc.bench.kv.pool import LAYOUT, MIB
from pd_grpc.bench.kv.ways import BASELINES
from pd_grpc.bench.processes import WorkerProcess

START_S = 120.0
"""How long a process may take until it has filled its pool."""
LEG_S = 120.0
_SEED = 20_26


class Case(NamedTuple):
    """What is moved, and how: `mib` in all, by `at_once` transfers of equal size."""

    way: str
    mib: int
    at_once: int = 1
    fragmented: bool = False

    @property
    def blocks(self) -> int:
        """Of each transfer."""
        return self.mib * MIB // LAYOUT.block_bytes // self.at_once


@dataclass(frozen=True)
class Leg:
    """What came of a case once. `seconds` until the last transfer was there, `took_s` of each;
    CPU and peak memory beyond the pools of either process; `wrong` blocks that are not what was
    sent."""

    case: Case
    seconds: float
    took_s: Sequence[float]
    sender_cpu_s: float
    receiver_cpu_s: float
    sender_peak_bytes: float
    receiver_peak_bytes: float
    wrong: int

    @property
    def gib_per_s(self) -> float:
        """The rate of all transfers together."""
        return self.case.mib / 1024 / self.seconds


@dataclass(frozen=True)
class Pair:
    """A sender and a receiver."""

    sender: WorkerProcess
    receiver: WorkerProcess

    async def run(self, case: Case, number: int) -> Leg:
        """Run a case; `number` is another one each time. WorkerLost."""
        told = {
            "way": case.way,
            "names": [f"t-{number}-{i}" for i in range(case.at_once)],
            "blocks": case.blocks,
            "fragmented": case.fragmented,
        }
        # Another order at each end, so that what lies at the same place by chance is no help.
        await self.receiver.do("expect", LEG_S, **told, seed=2 * number)
        sent = await self.sender.do("send", LEG_S, **told, seed=2 * number + 1)
        landed = await self.receiver.do("landed", LEG_S)
        return Leg(
            case,
            max(sent["took_s"]),
            sent["took_s"],
            sent["cpu_s"],
            landed["cpu_s"],
            sent["peak_bytes"],
            landed["peak_bytes"],
            0 if landed["digests"] is None else wrong_blocks(sent["digests"], landed["digests"]),
        )


def wrong_blocks(sent: Sequence[Sequence[int]], landed: Sequence[Sequence[int]]) -> int:
    """Blocks whose digests differ, or that are at one end alone."""
    wrong = abs(len(sent) - len(landed))
    for there, here in zip(sent, landed, strict=False):
        wrong += abs(len(there) - len(here))
        wrong += sum(x != y for x, y in zip(there, here, strict=False))
    return wrong


@asynccontextmanager
async def running_pairs(
    ways: Sequence[Sequence[str]], most_mib: int, settings: Mapping[str, Any]
) -> AsyncIterator[dict[str, Pair]]:
    """A pair for each group of ways, with pools of `most_mib`; by the names of the ways. The memory
    that one group keeps is not counted against another."""
    num_blocks = most_mib * MIB // LAYOUT.block_bytes
    async with AsyncExitStack() as stack:
        pairs: dict[str, Pair] = {}
        for group in ways:
            receiver = await _launch(stack, "kv-receiver")
            sender = await _launch(stack, "kv-sender")
            spec = {"ways": list(group), "num_blocks": num_blocks, "settings": dict(settings)}
            await receiver.start(START_S, **spec)
            await sender.start(START_S, **spec, seed=_SEED, addresses=receiver.about)
            pairs |= dict.fromkeys(group, Pair(sender, receiver))
        yield pairs


async def _launch(stack: AsyncExitStack, role: str) -> WorkerProcess:
    process = await WorkerProcess.launch(role)
    stack.push_async_callback(process.stop)
    return process


def cases_of(mib: int, at_once: int, transports: Sequence[str]) -> list[Case]:
    """Those of one amount."""
    found = [Case(name, mib) for name in BASELINES]
    for name in transports:
        for fragmented in (False, True):
            found.append(Case(name, mib, 1, fragmented))
            if Case(name, mib, at_once).blocks:
                found.append(Case(name, mib, at_once, fragmented))
    return found


def groups(transports: Sequence[str]) -> list[list[str]]:
    """The ways that share a pair of processes: the baselines, and each transport by itself."""
    return [list(BASELINES), *([name] for name in transports)]
