"""The benchmark of the prepare pool, whole."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from pd_grpc.bench.bad_decode import bad_decode_figures
from pd_grpc.bench.footprint import footprint_figures
from pd_grpc.bench.latency import latency_figures
from pd_grpc.bench.overload import overload_figures
from pd_grpc.bench.real_load import real_load_figures
from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_model import SERIAL_S, THREADS5_S
from pd_grpc.bench.seed_run import SeedRun, Tell, run_rows, seed_figures, seed_runs
from pd_grpc.bench.setup import DESCRIPTIONS, SETTINGS
from pd_grpc.bench.statistics import METHOD
from pd_grpc.bench.targets import judged

_PACKAGES = ("pd-grpc", "grpcio", "protobuf", "pyzmq")


Experiment = Callable[[Scope, Tell], Awaitable[Mapping[str, Any]]]
Keep = Callable[[Mapping[str, Any], Sequence[SeedRun]], None]
"""Is told the figures so far, and the seed workload's runs once they are complete."""

_AFTER_THE_SEED: tuple[Experiment, ...] = (
    bad_decode_figures,
    latency_figures,
    real_load_figures,
    overload_figures,
    footprint_figures,
)


async def bench_prepare(scope: Scope, tell: Tell, keep: Keep) -> None:
    """Every experiment in turn; `keep` is given the figures, as one JSON object, after each of them
    and after each run of the seed workload. `complete` says whether that is all."""
    began = time.monotonic()
    before = os.getloadavg()
    about = _about(scope)
    figures: dict[str, Any] = {}

    def say(runs: Sequence[SeedRun], complete: bool = False) -> None:
        load = {"before": before, "after": os.getloadavg()}
        so_far = {"complete": complete, "load_average": load, "took_s": time.monotonic() - began}
        keep({**about, **so_far, **figures, "targets_met": judged(figures)}, runs)

    def after_run(runs: list[SeedRun]) -> None:
        figures["seed_runs_s"] = seed_runs(runs)
        say([])

    runs = await run_rows(scope, tell, after_run)
    figures |= seed_figures(runs, scope)
    say(runs)
    for experiment in _AFTER_THE_SEED:
        figures |= await experiment(scope, tell)
        say(runs, complete=experiment is _AFTER_THE_SEED[-1])


def _about(scope: Scope) -> dict[str, Any]:
    return {
        "benchmark": "prepare",
        "compares": {row.value: text for row, text in DESCRIPTIONS.items()},
        "reference": {
            "zmq_serial_s": SERIAL_S,
            "zmq_threads5_s": THREADS5_S,
            "what": "1P1D, 0.3B model, 1,000 requests, 256 at once, 1,280 tokens in, 700 out",
        },
        "scope": {**asdict(scope), "trace": str(scope.trace or "")},
        "settings": SETTINGS,
        "intervals": METHOD,
        "machine": _machine(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "nice": psutil.Process().nice(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    """Its name where Linux tells it, its architecture elsewhere."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
