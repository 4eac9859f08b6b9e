"""The figures of docs/prepare.md, from a run of `pd-grpc bench prepare` that is kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pd_grpc.bench.setup import DESCRIPTIONS
from pd_grpc.bench.targets import TARGETS
from tools.marked_parts import Parts, table
from tools.proto_source import ROOT

RUN = ROOT / "docs" / "prepare.json"


def _run() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(RUN.read_text(encoding="utf-8"))
    return found


def _value(run: Mapping[str, Any], figure: str) -> tuple[str, str]:
    """A figure and its interval, where it has one."""
    low, high = run.get(f"{figure}_interval", (None, None))
    interval = "" if low is None else f"{_number(low)} to {_number(high)}"
    return _number(run[figure]), interval


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3f}"


def rows() -> str:
    """The seed workload: seconds of each way to prepare, measured and reckoned."""
    run = _run()
    cells = []
    for row, text in DESCRIPTIONS.items():
        seconds, interval = _value(run, f"{row.value}_s")
        cells.append((f"`{row.value}`", text, seconds, interval, _number(run["reckoned_s"][row])))
    return table("row | how it prepares | s | 95% interval | reckoned, s", cells)


def targets() -> str:
    """Each figure that has a target."""
    run = _run()
    cells = []
    for target in TARGETS:
        value, interval = _value(run, target.figure)
        met = "yes" if run["targets_met"][target.figure] else "**no**"
        cells.append((f"`{target.figure}`", value, interval, str(target), met))
    return table("figure | value | 95% interval | target | met", cells)


def others() -> str:
    """Figures without a target."""
    run = _run()
    names = [
        "threads5_prediction_error",
        "threads5_reckoned_error",
        "full_d_ratio_threads5",
        "silent_d_ratio_threads5",
        "slow_d_ratio_threads5",
        "real_load_finished",
        "real_load_requests",
        "overload_capacity_per_s",
    ]
    return table("figure | value", [(f"`{name}`", _number(run[name])) for name in names])


PARTS: Parts = {"rows": rows, "targets": targets, "others": others}
