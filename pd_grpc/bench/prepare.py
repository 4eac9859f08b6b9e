"""The benchmark of the prepare pool, whole."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict
from importlib import metadata
from typing import Any

from pd_grpc.bench.bad_decode import bad_decode_figures
from pd_grpc.bench.footprint import footprint_figures
from pd_grpc.bench.latency import latency_figures
from pd_grpc.bench.overload import overload_figures
from pd_grpc.bench.real_load import real_load_figures
from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_model import SERIAL_S, THREADS5_S
from pd_grpc.bench.seed_run import SeedRun, Tell, run_rows, seed_figures
from pd_grpc.bench.setup import DESCRIPTIONS
from pd_grpc.bench.statistics import METHOD
from pd_grpc.bench.targets import judged

_PACKAGES = ("pd-grpc", "grpcio", "protobuf", "pyzmq")


async def bench_prepare(scope: Scope, tell: Tell) -> tuple[dict[str, Any], list[SeedRun]]:
    """Every experiment in turn: the figures as one JSON object, and the seed workload's runs for
    the plot."""
    began = time.monotonic()
    load_before = os.getloadavg()
    runs = await run_rows(scope, tell)
    figures = {
        **seed_figures(runs, scope),
        **await bad_decode_figures(scope, tell),
        **await latency_figures(scope, tell),
        **await real_load_figures(scope, tell),
        **await overload_figures(scope, tell),
        **await footprint_figures(scope, tell),
    }
    about = {
        "benchmark": "prepare",
        "compares": {row.value: text for row, text in DESCRIPTIONS.items()},
        "reference": {
            "zmq_serial_s": SERIAL_S,
            "zmq_threads5_s": THREADS5_S,
            "what": "1P1D, 0.3B model, 1,000 requests, 256 at once, 1,280 tokens in, 700 out",
        },
        "scope": {**asdict(scope), "trace": str(scope.trace or "")},
        "intervals": METHOD,
        "machine": _machine(),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "took_s": time.monotonic() - began,
    }
    return {**about, **figures, "targets_met": judged(figures)}, runs


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
