"""What the loads say, and the figures to reach."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pd_grpc.bench.targets import Target

Load = Mapping[str, Any]
WAYS = ("safetensors", "gguf_cached", "gguf_first")
FROM_IMPORT = ("safetensors_from_import", "gguf_cached_from_import")
"""Without a load before."""
GROWN = {"row_counts_mib": "safetensors_from_import", "row_counts_unbounded_mib": "unbounded"}
"""The growths, and the load after which each is seen."""
ROW_COUNTS = 200
_MIB = 1 << 20

TARGETS = (
    Target("load_ratio_gguf_cached", most=3.0),
    Target("peak_over_weights_safetensors", most=1.3),
    Target("peak_over_weights_gguf", most=1.3),
)
READING: Mapping[str, str] = {
    "load_ratio_gguf_cached": "seconds of a load from GGUF with the converted weights in the cache "
    "over those from safetensors; the median of the rounds, of which each runs every way once",
    "load_ratio_gguf_first": "the same with an empty cache, which is filled",
    "seconds": "from the call of load_engine to its return, all modules imported and a model of "
    "next to nothing loaded before; the median of the rounds",
    "peak_over_weights_*": "(peak - before - pool) over the bytes of the weights; the greatest of "
    "the rounds; gguf is gguf_cached. peak: the most that was resident (VmHWM, reset before the "
    "load by /proc/self/clear_refs), whole: anonymous memory and all mapped files, the weights' "
    "own and the libraries'. before: what is resident in the idle process, which has imported "
    "everything and loaded a model of next to nothing the same way, so that the pages of the "
    "libraries' code that a load runs do not count as its weights. pool: the pages of it that are "
    "resident (mincore); the others take no memory until they are written. The tokenizer counts",
    "peak_over_weights_*_from_import": "the same of one load each in a process that has imported "
    "everything and loaded nothing before: the pages of the libraries' code count as well",
    "row_counts_mib": f"MiB by which the process grows when the products of a layer are run with "
    f"{ROW_COUNTS} numbers of rows, after a load: what oneDNN keeps of products. As in a server's "
    "process, which bounds that (pd_grpc/servers/onednn.py) unless the environment says how; null "
    "of a model that runs by transformers' own code",
    "row_counts_unbounded_mib": "the same with the libraries' own bound, of 1,024 products",
    "mib.anonymous_after, mib.file_after": "RssAnon and RssFile of the process at the end, above "
    "what they were before; a safetensors file is mapped, so weights that stay as they are in it "
    "(the embedding) are file, and packed ones anonymous",
    "mib.rest_at_peak": "peak - before - pool - weights: tokenizer, what oneDNN keeps for each "
    "shape of product, objects of Python, and what is freed by the end",
}
FIGURES = (
    "load_ratio_gguf_cached",
    "load_ratio_gguf_first",
    "peak_over_weights_safetensors",
    "peak_over_weights_gguf",
    "peak_over_weights_safetensors_from_import",
    "peak_over_weights_gguf_from_import",
    "row_counts_mib",
    "row_counts_unbounded_mib",
    "safetensors_s",
    "gguf_cached_s",
    "gguf_first_s",
    "took_s",
)
"""Of the report, those to be shown."""


def figures_of(loads: Mapping[str, Sequence[Load]]) -> dict[str, Any]:
    """Of each way its loads, a round each: the ratios, the seconds, and a row of memory in MiB."""
    figures: dict[str, Any] = {}
    for way in ("gguf_cached", "gguf_first"):
        pairs = zip(loads[way], loads["safetensors"], strict=True)
        ratios = [ours["seconds"] / plain["seconds"] for ours, plain in pairs]
        figures[f"load_ratio_{way}"] = statistics.median(ratios)
    for name, way in (("safetensors", "safetensors"), ("gguf", "gguf_cached")):
        for ending in ("", "_from_import"):
            over = [_beside_pool(one) / one["weights_bytes"] for one in loads[way + ending]]
            figures[f"peak_over_weights_{name}{ending}"] = max(over)
    for way in WAYS:
        figures[f"{way}_s"] = statistics.median(load["seconds"] for load in loads[way])
    for name, way in GROWN.items():
        grown = loads[way][0]["grown_bytes"]
        figures[name] = None if grown is None else grown / _MIB
    figures["mib"] = {way: _parts(loads[way]) for way in (*WAYS, *FROM_IMPORT)}
    return figures


def _beside_pool(load: Load) -> int:
    """Bytes of the peak above what was resident before, without the pool."""
    return int(load["after"]["peak"] - load["before"]["resident"] - load["pool_resident_bytes"])


def _parts(loads: Sequence[Load]) -> dict[str, float]:
    """MiB, of the load with the greatest peak."""
    load = max(loads, key=_beside_pool)
    before, after = load["before"], load["after"]
    weights = load["weights_bytes"]
    parts = {
        "before": before["resident"],
        "weights": weights,
        "pool": load["pool_bytes"],
        "pool_resident": load["pool_resident_bytes"],
        "rest_at_peak": _beside_pool(load) - weights,
        "peak": after["peak"],
        "after": after["resident"],
        "anonymous_after": after["anonymous"] - before["anonymous"],
        "file_after": after["file"] - before["file"],
    }
    return {name: value / _MIB for name, value in parts.items()}
