"""The benchmark of telemetry: what spans and metrics cost the servers that make them.

Clusters that differ in nothing but how they are observed stand side by side, and the same requests
go to each in turn, in an order that changes from round to round. A ratio is made of two neighbours
in one round, so that what slows the machine down for a while slows both.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from pd_grpc.bench.endurance.report import made_on
from pd_grpc.bench.statistics import METHOD, estimate
from pd_grpc.bench.targets import Target
from pd_grpc.bench.telemetry_cost import span_costs
from pd_grpc.bench.telemetry_systems import (
    CLIENT,
    ENGINE,
    SERVERS,
    SINK,
    VARIANTS,
    Leg,
    Load,
    running_systems,
)
from pd_grpc.bench.workload import spread_lengths

Tell = Callable[[str], None]

TARGETS = (
    Target("throughput_ratio_sampled", least=0.99),
    Target("throughput_ratio_on", least=0.95),
)
FIGURES = (
    "throughput_ratio_sampled",
    "throughput_ratio_on",
    "throughput_ratio_local",
    "spans_per_request",
    "spans_lost",
    "wrong_answers",
    "took_s",
)
"""Of the report, those to be shown."""
_PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc")
_LIMIT_S = 120.0
"""Of one load on one cluster."""


@dataclass(frozen=True)
class Workload:
    """What is asked for in one leg. `time_scale` is that of sim's step times."""

    description: str
    prompt: int
    output: int
    requests: int
    at_once: int
    time_scale: float
    rounds: int


HEADLINE = "conversation"
WORKLOADS: Mapping[str, Workload] = {
    HEADLINE: Workload(
        "prompts and answers as long as the medians of the Azure conversation trace (1,020 and 129 "
        "tokens: Patel et al., Splitwise, 2024), from an engine that takes no time of its own: the "
        "servers' own work, and so telemetry's, is all that bounds the throughput",
        1020,
        129,
        requests=200,
        at_once=32,
        time_scale=0.0,
        rounds=12,
    ),
    "paced": Workload(
        "the same, from an engine whose steps take the times of sim's table: they bound the "
        "throughput, as they do where a model runs",
        1020,
        129,
        requests=160,
        at_once=32,
        time_scale=1.0,
        rounds=4,
    ),
    "short": Workload(
        "the worst case: 64 tokens in and 8 out, from an engine that takes no time; a trace has as "
        "many spans as that of a long answer, and there is little else to do",
        64,
        8,
        requests=600,
        at_once=32,
        time_scale=0.0,
        rounds=8,
    ),
}


@dataclass(frozen=True)
class TelemetryScope:
    """How much is run."""

    quick: bool
    workloads: Mapping[str, Workload]

    @classmethod
    def of(cls, quick: bool) -> TelemetryScope:
        """All of it, or the same figures within two minutes."""
        if not quick:
            return cls(False, WORKLOADS)
        few: dict[str, dict[str, Any]] = {
            HEADLINE: {"requests": 96, "rounds": 3},
            "paced": {"requests": 100, "rounds": 1},
            "short": {"requests": 200, "rounds": 2},
        }
        return cls(True, {name: replace(WORKLOADS[name], **less) for name, less in few.items()})


async def bench_telemetry(scope: TelemetryScope, tell: Tell) -> dict[str, Any]:
    """Every workload in turn; the figures, as one JSON object."""
    began, before = time.monotonic(), os.getloadavg()
    tell("the cost of a span")
    figures: dict[str, Any] = {"span_costs_us": span_costs()}
    workloads: dict[str, Any] = {}
    for name, workload in scope.workloads.items():
        workloads[name] = workload_figures(workload, await _legs(name, workload, tell))
    headline = workloads[HEADLINE]
    for variant in ("sampled", "on", "local"):
        figures[f"throughput_ratio_{variant}"] = headline["throughput_ratio"][variant]["median"]
    figures["spans_per_request"] = headline["spans_per_request"]
    figures["spans_lost"] = sum(each["spans_lost"] for each in workloads.values())
    figures["wrong_answers"] = sum(each["wrong_answers"] for each in workloads.values())
    about = made_on()
    about["versions"] |= {name: metadata.version(name) for name in _PACKAGES}
    about["load_average"] = {"before": before, "after": os.getloadavg()}
    return {
        "benchmark": "telemetry",
        "compares": {name: asdict(variant) for name, variant in VARIANTS.items()},
        "reading": READING,
        **figures,
        "targets_met": {t.figure: t.met(figures[t.figure]) for t in TARGETS},
        "workloads": workloads,
        "scope": asdict(scope),
        "settings": ENGINE,
        "intervals": METHOD,
        "took_s": time.monotonic() - began,
        **about,
    }


READING: Mapping[str, str] = {
    "throughput_ratio_*": f"of the workload `{HEADLINE}`: requests a second of the variant over "
    "those of `off` in the same round, the median of the rounds",
    "collector": "a process of this machine that keeps what it is sent and reads it after the "
    "load; its CPU is told apart, and the throughput pays for it: with a collector elsewhere the "
    "ratio is no worse",
    "server_cpu_ratio": "CPU of router, P and D for a request with `off` over that with the "
    "variant: the throughput that is left where neither clients nor a collector share their cores",
    "busiest_cpu_ratio": "the same of the server that telemetry costs the greatest part: what is "
    "left where each has a machine of its own and that one is what bounds the throughput",
    "cores_busy": "CPU of all processes over the wall clock; as many as there are cores when the "
    "machine bounds the throughput",
    "spans_lost": "of requests in `on` that were answered: spans that the collector did not get",
    "span_costs_us": "CPU of one span of a stage with four attributes and its end, in a thread "
    "of its own: without a provider, not sampled, recorded, recorded and kept, recorded and "
    "encoded",
}
"""What the figures mean; part of the report."""


async def _legs(name: str, workload: Workload, tell: Tell) -> list[list[Leg]]:
    """The legs of each round, on clusters of their own."""
    settings = {**ENGINE, "sim_time_scale": workload.time_scale}
    names = list(VARIANTS)
    rounds = []
    tell(f"{name}: starting {len(names)} clusters")
    async with running_systems(VARIANTS, settings) as systems:
        for number in range(workload.rounds):
            lengths = spread_lengths(
                workload.requests, workload.prompt, workload.output, seed=number
            )
            load = Load(lengths, workload.at_once, _LIMIT_S)
            await systems.prepare(f"{name}-{number}", load)
            legs = []
            for variant in order(names, number):
                tell(f"{name}: round {number + 1} of {workload.rounds}, {variant}")
                legs.append(await systems.run(variant, load))
            rounds.append(legs)
    return rounds


def order(names: Sequence[str], number: int) -> list[str]:
    """The variants in the order of a round: each comes first as often as any other, and every
    second time round they go backwards, so that none always follows the same."""
    turn = number % len(names)
    turned = [*names[turn:], *names[:turn]]
    return turned if number // len(names) % 2 == 0 else turned[::-1]


def workload_figures(workload: Workload, rounds: Sequence[Sequence[Leg]]) -> dict[str, Any]:
    """What the legs of one workload say."""
    by_variant = {
        name: [leg for legs in rounds for leg in legs if leg.variant == name] for name in VARIANTS
    }
    off, on = by_variant["off"], by_variant["on"]
    others = [name for name in VARIANTS if name != "off"]
    cpu_ms = {name: _cpu_ms(legs) for name, legs in by_variant.items()}
    answered = sum(leg.right for leg in on)
    return {
        **asdict(workload),
        "requests_per_s": {
            name: statistics.median(leg.rate for leg in legs) for name, legs in by_variant.items()
        },
        "throughput_ratio": {
            name: _ratios(by_variant[name], off, lambda leg: leg.rate) for name in others
        },
        "server_cpu_ratio": {name: _ratios(off, by_variant[name], _server_ms) for name in others},
        "busiest_cpu_ratio": {
            name: min(cpu_ms["off"][role] / cpu_ms[name][role] for role in SERVERS)
            for name in others
        },
        "cpu_ms_per_request": cpu_ms,
        "cores_busy": {
            name: statistics.median(sum(leg.cpu_s.values()) / leg.wall_s for leg in legs)
            for name, legs in by_variant.items()
        },
        "spans_per_request": sum(leg.spans["spans"] for leg in on) / max(1, answered),
        "spans_by_name_per_request": _by_name(on, answered),
        "spans_lost": sum(lost_spans(leg) for leg in on),
        "traces_of_sampled": sum(leg.spans["traces"] for leg in by_variant["sampled"]),
        "requests_of_sampled": sum(leg.right for leg in by_variant["sampled"]),
        "span_bytes_per_request": sum(leg.spans["span_bytes"] for leg in on) / max(1, answered),
        "wrong_answers": sum(len(leg.wrong) for legs in rounds for leg in legs),
        "wrong": [text for legs in rounds for leg in legs for text in leg.wrong][:8],
    }


def lost_spans(leg: Leg) -> int:
    """Spans that a collector should have got from a leg of which every request is recorded: those
    that traces lack, and those of traces that never came."""
    missing_traces = max(0, leg.right - leg.spans["traces"])
    lost: int = leg.spans["missing"] + missing_traces * leg.spans["spans_of_a_trace"]
    return lost


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """What makes a run worthless; a target that is missed does not."""
    wrong = report["wrong_answers"]
    first = [text for each in report["workloads"].values() for text in each["wrong"]][:1]
    return [f"{wrong} requests were not answered as they should be: {first[0]}"] if wrong else []


def _ratios(
    upper: Sequence[Leg], lower: Sequence[Leg], of: Callable[[Leg], float]
) -> dict[str, Any]:
    """Round by round; one in which either has nothing to tell, for its requests went wrong, is left
    out."""
    pairs = [(of(x), of(y)) for x, y in zip(upper, lower, strict=True)]
    ratios = [x / y for x, y in pairs if x > 0 and y > 0]
    if not ratios:
        return {"median": 0.0, "interval": [0.0, 0.0], "rounds": []}
    found = estimate(ratios)
    return {"median": found.median, "interval": [found.low, found.high], "rounds": ratios}


def _server_ms(leg: Leg) -> float:
    return sum(leg.cpu_s[role] for role in SERVERS) / max(1, leg.right) * 1000


def _cpu_ms(legs: Sequence[Leg]) -> dict[str, float]:
    return {
        name: statistics.median(leg.cpu_s[name] / max(1, leg.right) * 1000 for leg in legs)
        for name in (*SERVERS, SINK, CLIENT)
    }


def _by_name(legs: Sequence[Leg], answered: int) -> dict[str, float]:
    names = sorted({name for leg in legs for name in leg.spans["by_name"]})
    return {
        name: sum(leg.spans["by_name"].get(name, 0) for leg in legs) / max(1, answered)
        for name in names
    }
