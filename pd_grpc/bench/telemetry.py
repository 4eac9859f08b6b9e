"""The benchmark of telemetry: what spans and metrics cost the servers that make them.

Clusters that differ in nothing but how they are observed stand side by side. For the throughput the
same requests go to each in turn, in an order that changes from round to round, and a ratio is made
within a round, so that what slows the machine down for a while slows both. For CPU they go to all
at the same time: what else the machine does then makes no difference between them.
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
    "throughput_ratio_same",
    "server_cpu_ratio_sampled",
    "server_cpu_ratio_on",
    "server_cpu_ratio_local",
    "server_cpu_ratio_same",
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
    """What is asked for. Each round has one leg of `requests` per cluster, one after another; each
    round `together` has half of them for each, at the same time and as many under way: batches are
    the smaller, and steps the more, the fewer there are. `time_scale` is that of sim's step
    times."""

    description: str
    prompt: int
    output: int
    requests: int
    at_once: int
    time_scale: float
    rounds: int
    together: int


HEADLINE = "conversation"
WORKLOADS: Mapping[str, Workload] = {
    HEADLINE: Workload(
        "prompts and answers as long as the medians of the Azure conversation trace (1,020 and 129 "
        "tokens: Patel et al., Splitwise, 2024), from an engine that takes no time of its own: the "
        "servers' own work, and so telemetry's, is all that bounds the throughput",
        1020,
        129,
        requests=160,
        at_once=32,
        time_scale=0.0,
        rounds=10,
        together=10,
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
        together=2,
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
        together=8,
    ),
}


@dataclass(frozen=True)
class TelemetryScope:
    """How much is run."""

    quick: bool
    workloads: Mapping[str, Workload]

    @classmethod
    def of(cls, quick: bool, headline: bool = False) -> TelemetryScope:
        """All of it, the headline alone, or the same figures in a few minutes."""
        if headline:
            return cls(False, {HEADLINE: WORKLOADS[HEADLINE]})
        if not quick:
            return cls(False, WORKLOADS)
        few: dict[str, dict[str, Any]] = {
            HEADLINE: {"requests": 64, "rounds": 2, "together": 2},
            "paced": {"requests": 64, "rounds": 1, "together": 1},
            "short": {"requests": 160, "rounds": 2, "together": 2},
        }
        return cls(True, {name: replace(WORKLOADS[name], **less) for name, less in few.items()})


async def bench_telemetry(scope: TelemetryScope, tell: Tell) -> dict[str, Any]:
    """Every workload in turn; the figures, as one JSON object."""
    began, before = time.monotonic(), os.getloadavg()
    tell("the cost of a span")
    figures: dict[str, Any] = {"span_costs_us": span_costs()}
    workloads: dict[str, Any] = {}
    for name, workload in scope.workloads.items():
        workloads[name] = workload_figures(workload, *await _legs(name, workload, tell))
    headline = workloads[HEADLINE]
    for variant in ("sampled", "on", "local", "same"):
        for of in ("throughput_ratio", "server_cpu_ratio"):
            figures[f"{of}_{variant}"] = headline[of][variant]["median"]
            figures[f"{of}_{variant}_interval"] = headline[of][variant]["interval"]
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
    "*_same": "of a second cluster that is as `off`: how far chance goes, and so how much the "
    "other ratios tell on the machine as it was",
    "server_cpu_ratio_*": "CPU of router, P and D for a request with `off` over that with the "
    "variant: the throughput that is left where neither clients nor a collector share their "
    "cores; of the rounds in which all clusters were asked at the same time",
    "busiest_cpu_ratio": "the same of the server that telemetry costs the greatest part: what is "
    "left where each has a machine of its own and that one is what bounds the throughput",
    "cores_busy": "CPU of all processes over the wall clock; as many as there are cores when the "
    "machine bounds the throughput",
    "spans_lost": "of requests in `on` that were answered: spans that the collector did not get",
    "span_costs_us": "CPU of one span of a stage with four attributes and its end, in a thread "
    "of its own: without a provider, not sampled, recorded as OpenTelemetry's SDK does it and as "
    "the servers do, recorded and kept, recorded and encoded",
}
"""What the figures mean; part of the report."""


async def _legs(
    name: str, workload: Workload, tell: Tell
) -> tuple[list[list[Leg]], list[list[Leg]]]:
    """The legs of each round, and of each round together, on clusters of their own."""
    settings = {**ENGINE, "sim_time_scale": workload.time_scale}
    names = list(VARIANTS)
    rounds, together = [], []
    tell(f"{name}: starting {len(names)} clusters")
    async with running_systems(VARIANTS, settings) as systems:
        for number in range(workload.rounds):
            load = _load(workload, number, 1)
            await systems.prepare(f"{name}-{number}", load)
            legs = []
            for variant in order(names, number):
                tell(f"{name}: round {number + 1} of {workload.rounds}, {variant}")
                legs.append(await systems.run(variant, load))
            rounds.append(legs)
        for number in range(workload.together):
            tell(f"{name}: round {number + 1} of {workload.together}, all together")
            load = _load(workload, number, 2)
            await systems.prepare(f"{name}-together-{number}", load)
            together.append(await systems.run_together(load))
    return rounds, together


def _load(workload: Workload, number: int, part: int) -> Load:
    """That of a round: a `part`th of it, for each round other lengths."""
    lengths = spread_lengths(
        workload.requests // part, workload.prompt, workload.output, seed=number
    )
    return Load(lengths, workload.at_once, _LIMIT_S)


def order(names: Sequence[str], number: int) -> list[str]:
    """The variants in the order of a round: each comes first as often as any other, and every
    second time round they go backwards, so that none always follows the same."""
    turn = number % len(names)
    turned = [*names[turn:], *names[:turn]]
    return turned if number // len(names) % 2 == 0 else turned[::-1]


def workload_figures(
    workload: Workload, rounds: Sequence[Sequence[Leg]], together: Sequence[Sequence[Leg]]
) -> dict[str, Any]:
    """What the legs of one workload say."""
    by_variant, at_the_same_time = _by_variant(rounds), _by_variant(together)
    off, on = by_variant["off"], by_variant["on"]
    others = [name for name in VARIANTS if name != "off"]
    cpu_ms = {name: _cpu_ms(legs) for name, legs in at_the_same_time.items()}
    answered = max(1, sum(leg.right for leg in on))
    all_legs = [leg for legs in (*rounds, *together) for leg in legs]
    return {
        **asdict(workload),
        "requests_per_s": {
            name: statistics.median(leg.rate for leg in legs) for name, legs in by_variant.items()
        },
        "throughput_ratio": {
            name: _ratios(by_variant[name], off, lambda leg: leg.rate) for name in others
        },
        "server_cpu_ratio": {
            name: _ratios(at_the_same_time["off"], at_the_same_time[name], _server_ms)
            for name in others
        },
        "busiest_cpu_ratio": {
            name: min(cpu_ms["off"][role] / max(cpu_ms[name][role], 1e-9) for role in SERVERS)
            for name in others
        },
        "cpu_ms_per_request": cpu_ms,
        "collector_cpu_ms_per_request": {
            name: _median_ms(legs, SINK) for name, legs in by_variant.items()
        },
        "cores_busy": {
            name: statistics.median(sum(leg.cpu_s.values()) / leg.wall_s for leg in legs)
            for name, legs in by_variant.items()
        },
        "spans_per_request": sum(leg.spans["spans"] for leg in on) / answered,
        "spans_by_name_per_request": _by_name(on, answered),
        "spans_lost": sum(lost_spans(leg) for leg in all_legs if leg.variant == "on"),
        "traces_of_sampled": sum(leg.spans["traces"] for leg in by_variant["sampled"]),
        "requests_of_sampled": sum(leg.right for leg in by_variant["sampled"]),
        "span_bytes_per_request": sum(leg.spans["span_bytes"] for leg in on) / answered,
        "wrong_answers": sum(len(leg.wrong) for leg in all_legs),
        "wrong": [text for leg in all_legs for text in leg.wrong][:8],
    }


def _by_variant(rounds: Sequence[Sequence[Leg]]) -> dict[str, list[Leg]]:
    return {
        name: [leg for legs in rounds for leg in legs if leg.variant == name] for name in VARIANTS
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
    return {name: _median_ms(legs, name) for name in (*SERVERS, CLIENT)}


def _median_ms(legs: Sequence[Leg], name: str) -> float:
    return statistics.median(leg.cpu_s[name] / max(1, leg.right) * 1000 for leg in legs)


def _by_name(legs: Sequence[Leg], answered: int) -> dict[str, float]:
    names = sorted({name for leg in legs for name in leg.spans["by_name"]})
    return {
        name: sum(leg.spans["by_name"].get(name, 0) for leg in legs) / answered for name in names
    }
