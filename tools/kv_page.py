"""The figures of docs/kv.md, from a run of `pd-grpc bench kv` that is kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.marked_parts import Parts, table
from tools.proto_source import ROOT

RUN = ROOT / "docs" / "kv.json"


def _run() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(RUN.read_text(encoding="utf-8"))
    return found


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def _interval(figures: Mapping[str, Any], name: str) -> str:
    low, high = figures.get(f"{name}_interval", (None, None))
    return "" if low is None else f"{_number(low)} to {_number(high)}"


def setting() -> str:
    """What the run was."""
    run = _run()
    before, after = (run["load_average"][when][0] for when in ("before", "after"))
    sizes = run["scope"]["sizes_mib"]
    rounds = min(row["rounds"] for row in run["rows"])
    flag = " --quick" if run["scope"]["quick"] else ""
    minutes = f"{run['took_s'] / 60:.1f} minutes"
    block, layer = (run["layout"][f"{of}_bytes"] >> 10 for of in ("block", "layer"))
    return (
        f"`pd-grpc bench kv{flag}`, {minutes} on {run['machine']['cores']} "
        f"cores, load {before:.1f} before and {after:.1f} after; {rounds} rounds of "
        f"{', '.join(str(mib) for mib in sizes)} MiB; blocks of {block} KiB, {layer} KiB a layer; "
        f"{run['wrong_blocks']} blocks came wrong."
    )


def targets() -> str:
    """Each figure that has a target and was measured."""
    run = _run()
    cells = []
    for name, target in run["targets"].items():
        if run[name] is None:
            continue
        met = "yes" if run["targets_met"][name] else "**no**"
        cells.append((f"`{name}`", _number(run[name]), _interval(run, name), target, met))
    return table("figure | value | 95% interval | target | met", cells)


def ways() -> str:
    """The ways that are compared."""
    return table(
        "way | what it is", [(f"`{name}`", text) for name, text in _run()["compares"].items()]
    )


def rates() -> str:
    """Every way at the amount of the headline."""
    run = _run()
    cells = []
    for row in run["rows"]:
        if row["mib"] != run["headline_mib"]:
            continue
        pools = "fragmented" if row["fragmented"] else "contiguous"
        cpu, peak = row["cpu_s_per_gib"], row["peak_mib"]
        cells.append(
            (
                f"`{row['way']}`",
                str(row["at_once"]),
                pools,
                _number(row["gib_per_s"]),
                _interval(row, "gib_per_s"),
                f"{_number(cpu['sender'])} + {_number(cpu['receiver'])}",
                f"{peak['sender']:.0f} + {peak['receiver']:.0f}",
            )
        )
    heads = "way | at once | pools | GiB/s | 95% interval | CPU, s/GiB | peak, MiB"
    return table(heads, cells)


def transports() -> str:
    """What is told of each transport at the amount of the headline."""
    names = ("fragmented_over_contiguous", "eight_over_one", "slowest_over_fastest")
    cells = [
        (f"`{transport}`", *(_number(figures[name]) for name in names))
        for transport, figures in _run()["by_transport"].items()
    ]
    return table("transport | " + " | ".join(f"`{name}`" for name in names), cells)


def decoding() -> str:
    """A D that decodes, by what else the machine does."""
    run = _run()["decoding"]
    what = {
        "quiet": "nothing else",
        "busy": f"{run['transfers_at_once']} transfers at once land in it without end",
        "apart": "the same transfers land in another D, which decodes nothing",
        "spinning": "two other processes only compute",
    }
    cells = [
        (
            f"`{name}`",
            text,
            _number(run["itl_p99_ms"][name]),
            _number(run["control_p99_ms"][name]),
            str(run["tokens"][name]),
        )
        for name, text in what.items()
    ]
    heads = "stretch | beside the decoding | token gap p99, ms | small call p99, ms | gaps"
    rates = run["landed_gib_per_s"]
    landed = f"In `busy` {rates['busy']:.2f} GiB/s landed, in `apart` {rates['apart']:.2f}."
    return "\n".join((table(heads, cells), "", landed))


PARTS: Parts = {
    "setting": setting,
    "targets": targets,
    "ways": ways,
    "rates": rates,
    "transports": transports,
    "decoding": decoding,
}
