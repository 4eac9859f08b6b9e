"""The figures of loading in docs/engine.md, from a run of `pd-grpc bench load` kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.marked_parts import Parts, table
from tools.proto_source import ROOT

RUN = ROOT / "docs" / "load.json"

_FURTHER = (
    "load_ratio_gguf_first",
    "peak_over_weights_safetensors_from_import",
    "peak_over_weights_gguf_from_import",
    "row_counts_mib",
    "row_counts_unbounded_mib",
)
_PARTS = ("before", "weights", "pool_resident", "rest_at_peak", "peak")
_AFTER = ("anonymous_after", "file_after")


def _run() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(RUN.read_text(encoding="utf-8"))
    return found


def load_setting() -> str:
    """What the run was."""
    run = _run()
    before, after = (run["load_average"][when][0] for when in ("before", "after"))
    scope, flag = run["scope"], " --quick" if run["scope"]["quick"] else ""
    return (
        f"`pd-grpc bench load{flag}`, {run['took_s']:.0f} s: {run['model']} in {scope['dtype']}, "
        f"{scope['rounds']} rounds on {run['machine']['cores']} cores, load {before:.1f} before "
        f"and {after:.1f} after."
    )


def load_targets() -> str:
    """Each ratio beside what it is to reach."""
    run = _run()
    cells = [
        (f"`{name}`", f"{run[name]:.2f}", target, "yes" if run["targets_met"][name] else "**no**")
        for name, target in run["targets"].items()
    ]
    # An older run lacks some, and some models have none of others.
    told = [name for name in _FURTHER if run.get(name) is not None]
    cells += [(f"`{name}`", f"{run[name]:.2f}", "", "") for name in told]
    return table("figure | value | target | met", cells)


def load_parts() -> str:
    """Seconds, and memory in MiB."""
    run = _run()
    cells = []
    for way, parts in run["mib"].items():
        seconds = f"{run[f'{way}_s']:.2f}" if f"{way}_s" in run else ""
        sizes = [f"{parts[name]:.0f}" for name in (*_PARTS, *_AFTER)]
        cells.append((f"`{way}`", seconds, *sizes))
    heads = (
        "way | s | before | weights | pool | rest at the peak | peak | anonymous, after | "
        "files, after"
    )
    return table(heads, cells)


PARTS: Parts = {
    "load_setting": load_setting,
    "load_targets": load_targets,
    "load_parts": load_parts,
}
"""What makes each part."""
