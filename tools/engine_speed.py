"""The figures of docs/engine.md, from a run of `pd-grpc bench engine` that is kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.marked_parts import Parts, table
from tools.proto_source import ROOT

RUN = ROOT / "docs" / "engine.json"


def _run() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(RUN.read_text(encoding="utf-8"))
    return found


def speed_setting() -> str:
    """What the run was."""
    run = _run()
    before, after = (run["load_average"][when][0] for when in ("before", "after"))
    flag = " --quick" if run["scope"]["quick"] else ""
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "transformers"))
    return (
        f"`pd-grpc bench engine{flag}`, {run['took_s'] / 60:.1f} minutes: {run['model']} in "
        f"{run['dtype']}, {run['threads']} threads on {run['machine']['cores']} cores "
        f"({run['machine']['cpu_capability']}), load {before:.1f} before and {after:.1f} after; "
        f"{run['scope']['rounds']} rounds of {run['scope']['new_tokens']} new tokens; {versions}."
    )


def speed_targets() -> str:
    """Each ratio beside what it is to reach."""
    run = _run()
    cells = []
    for name, target in run["targets"].items():
        low, high = run[f"{name}_interval"]
        met = "yes" if run["targets_met"][name] else "**no**"
        cells.append((f"`{name}`", f"{run[name]:.2f}", f"{low:.2f} to {high:.2f}", target, met))
    return table("figure | value | 95% interval | target | met", cells)


def speed_rates() -> str:
    """Tokens a second of both sides."""
    cells = []
    for row in _run()["rows"]:
        decode = row.get("decode_tokens_per_s", {})
        prefill = row["prefill_tokens_per_s"]
        same, prompts = row["same_tokens"]
        cells.append(
            (
                f"`{row['case']}`",
                *(f"{decode[side]:.1f}" if decode else "" for side in ("ours", "generate")),
                *(f"{prefill[side]:.0f}" for side in ("ours", "generate")),
                f"{same} of {prompts}",
            )
        )
    heads = "case | decode, ours | decode, `generate` | prefill, ours | prefill, `generate` | alike"
    return table(heads, cells)


PARTS: Parts = {
    "speed_setting": speed_setting,
    "speed_targets": speed_targets,
    "speed_rates": speed_rates,
}
