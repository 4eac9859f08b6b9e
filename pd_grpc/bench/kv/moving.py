"""Rounds of legs. What fails is named and costs no other its figures: a long run is not lost for
one leg of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from pd_grpc.bench.kv.figures import AT_ONCE
from pd_grpc.bench.kv.legs import Case, Leg, Pair, cases_of, groups, running_pairs

FAILURES = (RuntimeError, OSError, grpc.aio.AioRpcError)
"""What a part of a run may end with: a process that is lost, an answer that is not right."""
MOST_FAILURES = 2
"""Of a way; after them it is left out."""
LEAST_ROUNDS = 3


class Group:
    """Ways that share a pair of processes, which are started when they are first needed, and anew
    after a leg that failed. `failures` gets a line for each."""

    def __init__(self, ways: Sequence[str], most_mib: int, failures: list[str]) -> None:
        self._ways = ways
        self._most_mib = most_mib
        self._failures = failures
        self._failed: Counter[str] = Counter()
        self._stack = AsyncExitStack()
        self._pairs: Mapping[str, Pair] = {}

    async def run(self, case: Case, number: int) -> Leg | None:
        """Run a case, see `Pair.run`; None when it fails, or its way has too often."""
        if self._failed[case.way] >= MOST_FAILURES:
            return None
        try:
            if not self._pairs:
                running = running_pairs([self._ways], self._most_mib, {})
                self._pairs = await self._stack.enter_async_context(running)
            return await self._pairs[case.way].run(case, number)
        except FAILURES as error:
            self._failed[case.way] += 1
            self._failures.append(f"{case}: {error}")
            await self.stop()
            return None

    async def stop(self) -> None:
        """End the processes."""
        self._pairs = {}
        try:
            await self._stack.aclose()
        except FAILURES as error:
            self._failures.append(f"ending {', '.join(self._ways)}: {error}")


async def move(
    sizes_mib: Sequence[int],
    rounds: int,
    begun_within_s: float,
    transports: Sequence[str],
    failures: list[str],
    tell: Callable[[str], None],
) -> AsyncGenerator[list[list[Leg]], None]:
    """The legs of each round, by amount; so many rounds, or as many as are begun in time, but
    `LEAST_ROUNDS` at the least."""
    began, number = time.monotonic(), 0
    async with _groups(transports, max(sizes_mib), failures) as each:
        for turn in range(rounds):
            if turn >= LEAST_ROUNDS and time.monotonic() - began > begun_within_s:
                return
            found: list[list[Leg]] = []
            for mib in sizes_mib:
                tell(f"round {turn + 1} of {rounds}, {mib} MiB")
                found.append([])
                for case in order(cases_of(mib, AT_ONCE, transports), turn):
                    number += 1
                    leg = await each[case.way].run(case, number)
                    if leg is not None:
                        found[-1].append(leg)
            yield found


@asynccontextmanager
async def _groups(
    transports: Sequence[str], most_mib: int, failures: list[str]
) -> AsyncIterator[Mapping[str, Group]]:
    made = [Group(ways, most_mib, failures) for ways in groups(transports)]
    try:
        yield {
            way: group for ways, group in zip(groups(transports), made, strict=True) for way in ways
        }
    finally:
        for group in made:
            await group.stop()


def order(cases: Sequence[Case], turn: int) -> list[Case]:
    """The cases in the order of a round: each begins one now and then, and half of the rounds go
    backwards, so that none always follows the same."""
    at = turn * 3 % len(cases)
    turned = [*cases[at:], *cases[:at]]
    return turned if turn % 4 < 2 else turned[::-1]
