"""Serving at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pd_grpc.bench.serve.deployments import AGGREGATED, APART
from pd_grpc.bench.zmq_wire import load

_STYLES = {AGGREGATED: "#b2182b", APART: "#2166ac"}
_PANELS: tuple[tuple[str, str, str], ...] = (
    ("time to first token, ms", "ttft_ms", "p50"),
    ("the same, 99th percentile", "ttft_ms", "p99"),
    ("time between messages, 99th percentile, ms", "message_gap_ms", "p99"),
    ("share of requests that keep the objective", "goodput_share", ""),
)
"""Title, figure, and which percentile of it."""


def plot_serving(report: Mapping[str, Any], path: Path) -> None:
    """Times and goodput against the rate, a colour for each deployment. MissingExtra without
    matplotlib."""
    load("matplotlib").use("Agg")
    pyplot = load("matplotlib.pyplot")
    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), dpi=110)
    for axes, (title, name, share) in zip(panels.flat, _PANELS, strict=True):
        for mode, color in _STYLES.items():
            rows = [row for row in report["loads"] if row["mode"] == mode]
            values = [row[name][share] if share else row[name] for row in rows]
            rates = [row["rate_per_s"] for row in rows]
            axes.plot(rates, values, color=color, marker="o", markersize=4, label=mode)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("requests/s")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    cores = report["machine"]["cores"]
    figure.suptitle(f"{report['scope']['model']}, aggregated and 1P1D, {cores} cores")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
