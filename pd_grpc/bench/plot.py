"""The seed workload at a glance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from pd_grpc.bench.seed_run import SeedRun
from pd_grpc.bench.setup import Row
from pd_grpc.bench.zmq_wire import load

_STYLES = {
    Row.ZMQ_SERIAL: ("#b2182b", "-", "ZeroMQ, one after another"),
    Row.ZMQ_THREADS5: ("#ef8a62", "-", "ZeroMQ, five threads"),
    Row.ZMQ_ASYNC: ("#999999", "-", "ZeroMQ, asyncio"),
    Row.POOL: ("#2166ac", "-", "prepare pool (gRPC futures)"),
    Row.BOUND: ("#000000", ":", "bound: preparing costs nothing"),
}


def check_plot(path: Path) -> None:
    """ValueError for a name whose ending is no format of pictures. MissingExtra without
    matplotlib."""
    known = load("matplotlib.figure").Figure().canvas.get_supported_filetypes()
    ending = path.suffix.removeprefix(".").lower()
    if ending not in known:
        raise ValueError(f"the name must end with one of {', '.join(sorted(known))}")


def plot_rows(runs: Sequence[SeedRun], title: str, path: Path) -> None:
    """Requests done against time, a line per row: of its runs the one nearest to their median.
    MissingExtra without matplotlib."""
    load("matplotlib").use("Agg")
    pyplot = load("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for row, (color, line, label) in _STYLES.items():
        run = typical([run for run in runs if run.row is row])
        done = range(1, len(run.ends_s) + 1)
        axes.plot(run.ends_s, done, line, color=color, label=f"{label}: {run.seconds:.1f} s")
    axes.set_xlabel("time, s (unscaled)")
    axes.set_ylabel("requests done")
    axes.set_title(title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def typical(runs: Sequence[SeedRun]) -> SeedRun:
    """The run nearest to the median; ValueError for none."""
    if not runs:
        raise ValueError("runs: there is none to plot")
    median = statistics.median(run.seconds for run in runs)
    return min(runs, key=lambda run: abs(run.seconds - median))
