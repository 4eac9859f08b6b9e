"""The figures of docs/serve.md, from a run of `pd-grpc bench serve` that is kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.marked_parts import Parts, table
from tools.proto_source import ROOT

RUN = ROOT / "docs" / "serve.json"

_STAGES = ("client", "route", "queue", "prepare", "compute", "first_token", "exposed_send")


def _run() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(RUN.read_text(encoding="utf-8"))
    return found


def modes() -> str:
    """The deployments that are compared."""
    cells = [(f"`{name}`", text) for name, text in _run()["compares"].items()]
    return table("deployment | what it is", cells)


def setting() -> str:
    """What the run was."""
    run = _run()
    before, after = (run["load_average"][when][0] for when in ("before", "after"))
    work, scope = run["workload"], run["scope"]
    flags = " --quick" if scope["quick"] else ""
    if scope["rates"]:
        flags += f" --rates {','.join(f'{rate:g}' for rate in scope['rates'])}"
    capacity = run["capacity_per_s"]
    can = "" if capacity is None else f" The aggregated deployment did {capacity:.2f} requests/s."
    return (
        f"`pd-grpc bench serve{flags}`, {run['took_s'] / 60:.1f} minutes on "
        f"{run['machine']['cores']} cores, load {before:.1f} before and {after:.1f} after; "
        f"{scope['requests']} requests count at each rate; lengths times {work['scale']:g}, which "
        f"are {work['prompt_tokens_mean']:.0f} tokens in and {work['output_tokens_mean']:.0f} out "
        f"on average, and {work['prompt_tokens_longest']:,} and "
        f"{work['output_tokens_longest']} at the most.{can}"
    )


def _times(found: Mapping[str, float | None]) -> str:
    return " / ".join("–" if value is None else f"{value:.0f}" for value in found.values())


def loads() -> str:
    """Every rate on every deployment."""
    cells = []
    for load in sorted(_run()["loads"], key=lambda load: (load["rate_per_s"], load["mode"])):
        busy, spent = load["cores_busy"], load["cpu_s"]
        client = busy * spent["client"] / sum(spent.values())
        cells.append(
            (
                f"{load['rate_per_s']:.2f}",
                f"`{load['mode']}`",
                f"{load['completed']} of {load['sent']}",
                _times(load["ttft_ms"]),
                _times(load["tpot_ms"]),
                _times(load["message_gap_ms"]),
                f"{load['tokens_per_s']:.0f}",
                f"{load['goodput_share']:.2f}",
                f"{load['goodput_per_s']:.2f}",
                f"{busy:.2f}",
                f"{client:.2f}",
            )
        )
    heads = (
        "rate, 1/s | deployment | whole | TTFT | TPOT | gap | tokens/s | kept the objective | "
        "goodput, 1/s | cores | client"
    )
    return table(heads, cells)


def answers() -> str:
    """Whether the deployments gave the same answers."""
    run = _run()
    text = (
        f"Of {run['answers_compared']} answers of 1P1D {run['answers_equal']} are the aggregated "
        f"deployment's token by token, {run['answers_tied']} part from it at a tie, and "
        f"{run['answers_wrong']} are wrong."
    )
    widest = run["tie_nats"]["widest"]
    ties = f" The widest tie was {widest:.2f} nats." if run["answers_tied"] else ""
    return text + ties


def targets() -> str:
    """What the hand-over adds, and each figure that has a target."""
    run = _run()
    low, high = run["ttft_overhead_ms_interval"]
    added = f"{run['ttft_overhead_ms']:.1f}"
    cells = [("`ttft_overhead_ms`", added, f"{low:.1f} to {high:.1f}", "", "")]
    for name, target in run["targets"].items():
        met = "yes" if run["targets_met"][name] else "**no**"
        cells.append((f"`{name}`", f"{run[name]:.3f}", "", target, met))
    return table("figure | value | 95% interval | target | met", cells)


def stages() -> str:
    """Where the time to first token went, in milliseconds."""
    found = _run()["handover"]
    cells = [
        (
            f"`{mode}`",
            f"{found['ttft_ms'][mode]:.1f}",
            *(f"{spent[stage]:.1f}" for stage in _STAGES),
        )
        for mode, spent in found["stages_ms"].items()
    ]
    return table("deployment | TTFT | " + " | ".join(_STAGES), cells)


PARTS: Parts = {
    "modes": modes,
    "setting": setting,
    "loads": loads,
    "answers": answers,
    "targets": targets,
    "stages": stages,
}
