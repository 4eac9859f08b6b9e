"""Step tables from the measurements of splitwise-sim.

`https://github.com/Mutinifni/splitwise-sim` (MIT) publishes measured times of Llama-2-70B and
BLOOM-176B on A100 and H100, one row per run: `prompt_time` and `token_time` in ms for a batch of
`batch_size` prompts of `prompt_size` tokens. `read_splitwise` turns its CSV into a `StepTable`;
`SPLITWISE` holds two made so.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pd_grpc.engine.step_table import StepTable

_COLUMNS = ("model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "prompt_time")


class NoMeasurements(ValueError):
    """The file is none of splitwise-sim's, or holds no run of what was asked for."""


def read_splitwise(path: Path, model: str, hardware: str, tensor_parallel: int) -> StepTable:
    """The medians of one model on one kind of hardware. NoMeasurements, with what there is."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not set(_COLUMNS) <= rows[0].keys():
        raise NoMeasurements(f"{path}: has not the columns {', '.join(_COLUMNS)}")
    wanted = (model, hardware, str(tensor_parallel))
    found = [row for row in rows if _kind(row) == wanted]
    if not found:
        there = ", ".join("/".join(kind) for kind in sorted({_kind(row) for row in rows}))
        raise NoMeasurements(f"{path}: no runs of {'/'.join(wanted)}; there are {there}")
    return _table(found)


def _kind(row: Mapping[str, str]) -> tuple[str, str, str]:
    return row["model"], row["hardware"], row["tensor_parallel"]


def _table(rows: Iterable[Mapping[str, str]]) -> StepTable:
    rows = list(rows)
    prefill = _medians(rows, "prompt_time", lambda r: int(r["prompt_size"]) * int(r["batch_size"]))
    alone = [row for row in rows if row["batch_size"] == "1"]
    by_prompt = _medians(alone, "token_time", lambda r: int(r["prompt_size"]))
    context_ms = _slope(by_prompt)
    # The sizes of batch were all measured with prompts of one length.
    prompt = statistics.mode(int(row["prompt_size"]) for row in rows)
    same = [row for row in rows if int(row["prompt_size"]) == prompt]
    decode = _medians(same, "token_time", lambda r: int(r["batch_size"]))
    empty = {batch: ms - batch * prompt * context_ms for batch, ms in decode.items()}
    return StepTable(_points(prefill), _points(empty), context_ms)


def _medians(
    rows: Iterable[Mapping[str, str]], column: str, size: Callable[[Mapping[str, str]], int]
) -> dict[int, float]:
    times = defaultdict(list)
    for row in rows:
        times[size(row)].append(float(row[column]))
    return {at: statistics.median(found) for at, found in times.items()}


def _slope(points: Mapping[int, float]) -> float:
    """Of the straight line that fits best; none falls, for context makes no step shorter."""
    if len(points) < 2:
        return 0.0
    return max(0.0, statistics.linear_regression(list(points), list(points.values())).slope)


def _points(times: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """Rising from 1: what is smaller than anything measured takes as long as the smallest, and no
    step is shorter than a smaller one, which only noise makes it."""
    points: list[tuple[int, float]] = []
    for size in sorted(times):
        points.append((size, round(max(times[size], points[-1][1] if points else 0.0), 2)))
    return tuple(points) if points[0][0] == 1 else ((1, points[0][1]), *points)


SPLITWISE = {
    "llama2-70b/h100-80gb/8": StepTable(
        prefill=(
            (1, 58.19),
            (512, 58.19),
            (1024, 77.68),
            (2048, 134.42),
            (4096, 376.22),
            (8192, 831.49),
            (16384, 1551.73),
            (32768, 2936.33),
        ),
        decode=((1, 30.44), (4, 31.3), (8, 31.54), (16, 32.24), (32, 34.76), (64, 42.44)),
        decode_context_ms=0.000235,
    ),
    "llama2-70b/a100-80gb/8": StepTable(
        prefill=(
            (1, 65.35),
            (256, 66.76),
            (512, 93.02),
            (1024, 160.86),
            (2048, 282.71),
            (4096, 708.36),
            (8192, 1780.97),
            (16384, 3524.54),
            (32768, 7553.99),
        ),
        decode=((1, 44.85), (8, 45.05), (16, 47.46), (32, 47.46), (64, 59.69)),
        decode_context_ms=0.000364,
    ),
}
"""What `read_splitwise` makes of `perf_model.csv` as of 2024, by model, hardware and tensor
parallelism; points on a flat stretch are left out."""
