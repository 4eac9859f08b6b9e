"""What handing a request over adds to its time to first token, on an idle machine.

One request at a time goes to the aggregated deployment, to 1P1D whose P has as many threads as the
aggregated D, and to 1P1D with a thread each, in an order that changes from round to round. Each
prompt is its own, so that no cache has a part of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pd_grpc.bench.serve.deployments import AGGREGATED, WIDE, Deployments
from pd_grpc.bench.serve.load import requests_of
from pd_grpc.bench.serve.timing import Heard
from pd_grpc.bench.statistics import estimate
from pd_grpc.bench.workload import Length
from pd_grpc.client import STAGES

_OUTPUT = 4
"""More than the first token, so that KV moves; few, for they do not matter here."""
CLIENT_WAY = "client"
"""What is not the router's: from the client's call to the router, and back."""
_OF_FIRST_TOKEN = ("route", "queue", "prepare", "compute", "first_token")


@dataclass
class Handover:
    """Answers, of each round one of each mode."""

    prompt_tokens: int
    rounds: list[Mapping[str, Heard]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """`ttft_overhead_ms` is the median over the rounds of 1P1D's time to first token less the
        aggregated one's, with as many threads for P as for the aggregated D; its share is that of
        the aggregated one's compute. Null without a round."""
        if not self.rounds:
            names = ("ttft_overhead_ms", "ttft_overhead_ms_interval", "ttft_overhead_share")
            return {**dict.fromkeys(names), "handover": {}}
        added = estimate([_ms(each[WIDE]) - _ms(each[AGGREGATED]) for each in self.rounds])
        compute = self._median(AGGREGATED, "compute")
        return {
            "ttft_overhead_ms": added.median,
            "ttft_overhead_ms_interval": (added.low, added.high),
            "ttft_overhead_share": added.median / compute,
            "handover": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        stages = (CLIENT_WAY, *STAGES)
        return {
            "prompt_tokens": self.prompt_tokens,
            "rounds": len(self.rounds),
            "ttft_ms": {
                mode: statistics.median(_ms(each[mode]) for each in self.rounds)
                for mode in self.rounds[0]
            },
            "stages_ms": {
                mode: {stage: self._median(mode, stage) for stage in stages if stage != "total"}
                for mode in self.rounds[0]
            },
        }

    def _median(self, mode: str, stage: str) -> float:
        return statistics.median(stages_of(each[mode])[stage] for each in self.rounds)


def stages_of(answer: Heard) -> dict[str, float]:
    """The stages of an answer as the router tells them, and the rest of the client's time to first
    token."""
    told = sum(answer.stages_ms[stage] for stage in _OF_FIRST_TOKEN)
    return {**answer.stages_ms, CLIENT_WAY: _ms(answer) - told}


def _ms(answer: Heard) -> float:
    return 1000 * answer.ttft_s


async def measure_handover(
    deployments: Deployments,
    modes: Sequence[str],
    rounds: int,
    prompt_tokens: int,
    seed: int,
    within_s: float,
    into: Handover,
) -> list[str]:
    """Rounds beside a first one that does not count; the faults of those that failed, whose rounds
    are left out."""
    faults = []
    for number in range(rounds + 1):
        heard = {}
        for turn in range(len(modes)):
            mode = modes[(number + turn) % len(modes)]
            name = f"handover-{seed}-{number}-{mode}"
            request = requests_of(name, [0.0], [Length(prompt_tokens, _OUTPUT)])
            heard[mode] = (await deployments.open(mode, request, within_s)).answers[0]
        failed = [f"{mode}: {each.fault}" for mode, each in heard.items() if each.fault]
        faults += failed
        if number and not failed:
            into.rounds.append({mode: heard[mode] for mode in modes})
    return faults
