"""The rates at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pd_grpc.bench.kv.ways import WAYS
from pd_grpc.bench.zmq_wire import load


def plot_rates(report: Mapping[str, Any], path: Path) -> None:
    """Rate against amount, a line for each way with one transfer of one run of blocks; of ours also
    with eight at once (dashed) and from fragmented pools (dotted). MissingExtra without
    matplotlib."""
    load("matplotlib").use("Agg")
    pyplot = load("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=120)
    for i, way in enumerate(WAYS):
        for at_once, fragmented, line in ((1, False, "-"), (8, False, "--"), (1, True, ":")):
            rows = [
                row
                for row in report["rows"]
                if (row["way"], row["at_once"], row["fragmented"]) == (way, at_once, fragmented)
            ]
            if not rows:
                continue
            label = (
                way
                + (f" x{at_once}" if at_once > 1 else "")
                + (", fragmented" if fragmented else "")
            )
            axes.plot(
                [row["mib"] for row in rows],
                [row["gib_per_s"] for row in rows],
                line,
                color=f"C{i}",
                marker="o",
                markersize=3,
                label=label,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("KV moved, MiB")
    axes.set_ylabel("GiB/s")
    cores = report["machine"]["cores"]
    load_before = report["load_average"]["before"][0]
    axes.set_title(f"Moving KV between two processes, {cores} cores, load {load_before:.1f}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
