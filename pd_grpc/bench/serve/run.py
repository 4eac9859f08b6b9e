"""The benchmark of serving: aggregated against 1P1D on the same two cores.

The deployments take turns, and get the same requests at the same moments; who is first changes from
rate to rate. Whoever is not asked is idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from pd_grpc.bench.endurance.report import made_on
from pd_grpc.bench.serve.answers import TIE_NATS, Comparison, compare
from pd_grpc.bench.serve.deployments import (
    AGGREGATED,
    APART,
    MODES,
    WIDE,
    Deployments,
    running_deployments,
)
from pd_grpc.bench.serve.figures import load_figures
from pd_grpc.bench.serve.handover import Handover, measure_handover
from pd_grpc.bench.serve.load import drawn, poisson_times, requests_of, scaled_lengths
from pd_grpc.bench.serve.timing import Objective, saturated_rate
from pd_grpc.bench.statistics import METHOD
from pd_grpc.bench.targets import Target
from pd_grpc.bench.trace import SOURCE
from pd_grpc.bench.workload import Length, mean_lengths

Tell = Callable[[str], None]
Report = dict[str, Any]

TARGETS = (Target("ttft_overhead_share", most=0.1),)
READING: Mapping[str, str] = {
    "capacity_per_s": "answers a second of the aggregated deployment under a closed load",
    "loads": "every rate on every deployment; load is the rate over capacity_per_s",
    "ttft_ms": "from sending a request to the message with its first token",
    "tpot_ms": "from there to the last token, over the tokens but the first",
    "message_gap_ms": "between two messages of an answer; vLLM's inter-token latency",
    "token_gap_ms": "a message of k tokens g after the last counts as k gaps of g / k",
    "goodput_share": "requests of those sent whose TTFT and TPOT both keep the objective",
    "cores_busy": "processor time of servers and client over the time the load took",
    "answers": "of the same request by aggregated and 1P1D, token by token; a tie parts from the "
    "other by a token within tie_nats of the likeliest",
    "ttft_overhead_ms": "TTFT of 1P1D less that aggregated, P with as many threads as that D",
    "ttft_overhead_share": "of the aggregated one's compute",
    "stages_ms": "medians; client is what the router does not see",
}
OBJECTIVE = Objective(ttft_s=2.0, tpot_s=0.2)
"""What MLPerf Inference asks of a server of Llama-2-70B: a reader waits no longer for an answer to
begin, and gets five tokens a second, about as fast as one reads."""
_WIDE_AT = 1
"""The rate, by its number, at which the deployment with twice the threads takes part."""
FIGURES = (
    "capacity_per_s",
    "ttft_overhead_ms",
    "ttft_overhead_share",
    "answers_compared",
    "answers_equal",
    "answers_wrong",
    "failed",
    "took_s",
)


@dataclass(frozen=True)
class ServeScope:
    """How much is run, and of what."""

    quick: bool = False
    engine: str = "torch"
    model: str = "smollm2"
    flags: Sequence[str] = ()
    """Of every P and D."""
    seed: int = 1
    scale: float = 0.25
    """Factor on the lengths of the trace."""
    requests: int = 32
    """That count, at each rate."""
    warm_up: int = 4
    """That come before them."""
    rates: Sequence[float] | None = None
    """Requests a second; None for `loads` of the capacity that is measured."""
    loads: Sequence[float] = (0.3, 0.6, 0.9)
    saturating: int = 48
    at_once: int = 12
    within_s: float = 120.0
    """A request may take no longer."""
    objective: Objective = OBJECTIVE
    handover_rounds: int = 7
    handover_tokens: int = 1024

    @classmethod
    def of(cls, quick: bool, **given: Any) -> ServeScope:
        """All of it, within some eight minutes, or the same figures from far less; `given` goes
        first where it is not None."""
        less = {
            "quick": True,
            "scale": 0.1,
            "requests": 8,
            "warm_up": 2,
            "saturating": 20,
            "at_once": 8,
            "handover_rounds": 3,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        return cls(**{**(less if quick else {}), **chosen})


@dataclass
class _Found:
    """What a run has found so far."""

    scope: ServeScope
    lengths: Sequence[Length]
    began: float = field(default_factory=time.monotonic)
    before: tuple[float, float, float] = field(default_factory=os.getloadavg)
    capacity_per_s: float | None = None
    loads: list[Report] = field(default_factory=list)
    answers: Comparison = field(default_factory=Comparison)
    faults: list[str] = field(default_factory=list)
    handover: Handover = field(init=False)

    def __post_init__(self) -> None:
        self.handover = Handover(self.scope.handover_tokens)

    def report(self, complete: bool) -> Report:
        """As one JSON object; figures that there are not are null."""
        about = made_on()
        if self.scope.engine == "torch":
            about["versions"]["torch"] = metadata.version("torch")
        about["load_average"] = {"before": self.before, "after": os.getloadavg()}
        figures = self.handover.figures()
        prompt, output = mean_lengths(self.lengths)
        return {
            "benchmark": "serve",
            "complete": complete,
            "compares": {name: mode.description for name, mode in MODES.items()},
            "reading": dict(READING),
            "workload": {
                "source": SOURCE,
                "scale": self.scope.scale,
                "prompt_tokens_mean": prompt,
                "output_tokens_mean": output,
                "prompt_tokens_longest": max(each.prompt for each in self.lengths),
                "output_tokens_longest": max(each.output for each in self.lengths),
            },
            "capacity_per_s": self.capacity_per_s,
            "loads": self.loads,
            "failed": sum(load["failed"] for load in self.loads),
            "answers_compared": self.answers.compared,
            "answers_equal": self.answers.equal,
            "answers_tied": self.answers.ties,
            "answers_wrong": len(self.answers.wrong),
            "wrong": self.answers.wrong,
            "tie_nats": {"most": TIE_NATS, "widest": self.answers.widest_nats},
            "faults": self.faults,
            **figures,
            "targets": {target.figure: str(target) for target in TARGETS},
            "targets_met": {
                target.figure: target.met(figures[target.figure])
                for target in TARGETS
                if figures[target.figure] is not None
            },
            "scope": asdict(self.scope),
            "intervals": METHOD,
            "took_s": time.monotonic() - self.began,
            **about,
        }


async def bench_serve(
    scope: ServeScope, tell: Tell, keep: Callable[[Report], None] = lambda report: None
) -> Report:
    """The figures, as one JSON object; `keep` gets those so far after every part. NoFit when the
    trace does not fit the model, WorkerLost when a server ends."""
    tell("starting the deployments")
    async with running_deployments(
        (AGGREGATED, APART, WIDE), scope.engine, scope.model, scope.flags
    ) as deployments:
        lengths = scaled_lengths(scope.scale, await deployments.longest())
        found = _Found(scope, lengths)
        await _warm_up(deployments, scope, tell)
        found.faults += await measure_handover(
            deployments,
            (AGGREGATED, WIDE, APART),
            scope.handover_rounds,
            scope.handover_tokens,
            scope.seed,
            scope.within_s,
            found.handover,
        )
        keep(found.report(complete=False))
        if scope.rates is None:
            tell("measuring what the aggregated deployment can do")
            found.capacity_per_s = await _capacity(deployments, found)
        capacity = found.capacity_per_s
        rates = scope.rates or [load * (capacity or 0.0) for load in scope.loads]
        for number, rate in enumerate(rates):
            await _at_rate(deployments, found, number, rate, tell)
            keep(found.report(complete=False))
    return found.report(complete=True)


async def _warm_up(deployments: Deployments, scope: ServeScope, tell: Tell) -> None:
    """Open every connection, and touch every page of what is used."""
    for mode in (AGGREGATED, APART, WIDE):
        tell(f"warming {mode} up")
        requests = requests_of(f"warm-up-{mode}", [0.0] * 4, [Length(128, 8)] * 4)
        await deployments.closed(mode, requests, 4, scope.within_s)


async def _capacity(deployments: Deployments, found: _Found) -> float:
    scope = found.scope
    lengths = drawn(found.lengths, scope.saturating, f"{scope.seed} capacity")
    requests = requests_of(f"capacity-{scope.seed}", [0.0] * len(lengths), lengths)
    run = await deployments.closed(AGGREGATED, requests, scope.at_once, scope.within_s)
    found.faults += [f"capacity: {each.fault}" for each in run.answers if each.fault]
    return saturated_rate([each.ended_s for each in run.answers], scope.at_once)


async def _at_rate(
    deployments: Deployments, found: _Found, number: int, rate: float, tell: Tell
) -> None:
    scope = found.scope
    count, seed = scope.warm_up + scope.requests, f"{scope.seed} {number}"
    requests = requests_of(
        f"load-{scope.seed}-{number}",
        poisson_times(count, rate, seed),
        drawn(found.lengths, count, seed),
    )
    modes = [AGGREGATED, APART, *([WIDE] if number == _WIDE_AT else [])]
    modes = modes[number % 2 :] + modes[: number % 2]
    runs = {}
    for mode in modes:
        tell(f"{rate:.2f} requests/s on {mode}")
        runs[mode] = run = await deployments.open(mode, requests, scope.within_s)
        capacity = found.capacity_per_s
        found.loads.append(
            {
                "mode": mode,
                "rate_per_s": rate,
                "load": rate / capacity if capacity else None,
                **load_figures(run, scope.warm_up, scope.objective),
            }
        )
    tell("comparing the answers")
    reference = runs[AGGREGATED].answers
    for mode in modes:
        if mode != AGGREGATED:
            await compare(deployments, requests, reference, runs[mode].answers, found.answers)


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """What makes a run worthless; a target that is missed does not."""
    found = [f"failed: {fault}" for fault in report["faults"]]
    found += [f"failed: {fault}" for load in report["loads"] for fault in load["faults"]]
    return [*found, *(f"wrong: {wrong}" for wrong in report["wrong"])]
