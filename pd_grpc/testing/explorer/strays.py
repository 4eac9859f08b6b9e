"""Nobody may be able to write to what is another's.

Checked after every move, for every process of P that is there, stopped or not: each block that it
may yet write to is either granted to that writer, or quarantined for it. What is granted to
another, cached or free has no writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pd_grpc.testing.explorer.process import Violation
from pd_grpc.testing.explorer.receiving import STRAY

if TYPE_CHECKING:
    from pd_grpc.testing.explorer.world import State, World


def strays(world: World, state: State) -> Iterator[Violation]:
    """Blocks that a P may write to, and that D has for something else."""
    there = [world.looks(state, i) for i in range(world.scenario.first_client)]
    for looks, name in zip(there, world.names, strict=False):
        if looks is None:
            continue
        for server, epoch, grant, block in sorted(looks.writes):
            decode = there[world.names.index(server)]
            if decode is None or decode.facts[0] != epoch or decode.writable is None:
                continue
            if (grant, block) not in decode.writable:
                yield Violation(STRAY, f"{name}: it may write to block {block} of {server}")
