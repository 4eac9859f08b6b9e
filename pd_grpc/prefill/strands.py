"""Which shard of P sends what to which shard of D."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pd_grpc.protocol.shards import NOTHING, Part, Place


class Strand(NamedTuple):
    """One stream's way: from the shard `sender` of P to the shard `receiver` of D, which have some
    layer and head in common. `part` is what goes over it, NOTHING where another shard of P sends
    the same."""

    sender: int
    receiver: int
    part: Part


def plan_strands(senders: Sequence[Place], receivers: Sequence[Place]) -> tuple[Strand, ...]:
    """A strand for each pair that has something in common; over them every layer and head of each
    receiver goes once. Those that hold the same take turns at sending it, receiver by receiver.

    Either side's shards cover the model, and two of one side are equal or disjoint.
    """
    turns: Counter[Part] = Counter()
    strands = []
    for r, receiver in enumerate(receivers):
        shared = [(s, place.part.common(receiver.part)) for s, place in enumerate(senders)]
        for part in dict.fromkeys(senders[s].part for s, common in shared if common.area):
            holders = [s for s, place in enumerate(senders) if place.part == part]
            sends = holders[turns[part] % len(holders)]
            turns[part] += 1
            for s in holders:
                strands.append(Strand(s, r, shared[s][1] if s == sends else NOTHING))
    return tuple(sorted(strands, key=lambda strand: (strand.receiver, strand.sender)))
