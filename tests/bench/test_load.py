"""The benchmark of loading: a real load in a process of its own, and what is made of several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("psutil")
pytest.importorskip("torch")

import torch

from pd_grpc.bench.load.figures import FIGURES, FROM_IMPORT, GROWN, TARGETS, WAYS, figures_of
from pd_grpc.bench.load.run import faults_of
from pd_grpc.engine.saved_models import save_warm_model
from pd_grpc.servers.onednn import CAPACITIES

MIB = 1 << 20


def load(seconds: float, peak: int, reset: bool = True) -> dict[str, Any]:
    """Of 100 MiB of weights, with 2 of the pool's 8 MiB in use."""
    before = {"resident": 300 * MIB, "peak": 300 * MIB, "anonymous": 200 * MIB, "file": 100 * MIB}
    after = {"resident": 420 * MIB, "peak": peak * MIB, "anonymous": 290 * MIB, "file": 130 * MIB}
    return {
        "seconds": seconds,
        "peak_is_of_the_load": reset,
        "before": before,
        "after": after,
        "weights_bytes": 100 * MIB,
        "pool_bytes": 8 * MIB,
        "pool_resident_bytes": 2 * MIB,
        "grown_bytes": 7 * MIB,
    }


def each_way(loads: dict[str, Any], otherwise: dict[str, Any]) -> dict[str, Any]:
    """Loads of every way, `otherwise` where `loads` has none."""
    return {way: loads.get(way, [otherwise]) for way in (*WAYS, *FROM_IMPORT, *GROWN.values())}


def loaded(wanted: dict[str, Any], told: dict[str, str]) -> dict[str, Any]:
    """A real load in a process of its own that has also `told` in its environment."""
    environ = {name: value for name, value in os.environ.items() if name not in CAPACITIES}
    done = subprocess.run(
        [sys.executable, "-m", "pd_grpc.bench.load.child", json.dumps(wanted)],
        env={**environ, **told},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="memory is told by /proc")
def test_a_load_in_a_process_of_its_own_tells_its_time_and_memory(tmp_path: Path) -> None:
    save_warm_model(tmp_path)
    wanted = {"model": str(tmp_path), "warm": str(tmp_path), "dtype": "float32", "threads": 1}
    found = loaded(wanted, {})

    # Embedding and head, then of two layers queries, keys, values, out, the MLP, and all norms.
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    assert found["weights_bytes"] == 4 * (2 * 257 * 64 + 2 * layer + 64)
    assert 0 <= found["pool_resident_bytes"] <= found["pool_bytes"]
    assert found["seconds"] > 0
    assert found["after"]["peak"] >= found["after"]["resident"] > 0
    assert found["grown_bytes"] is None
    figures = figures_of(each_way({}, found))
    assert set(FIGURES) - set(figures) == {"took_s"}
    assert {target.figure for target in TARGETS} <= set(figures)
    assert figures["load_ratio_gguf_cached"] == figures["load_ratio_gguf_first"] == 1.0
    json.dumps(figures)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is told by /proc")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_what_many_row_counts_leave_behind_is_bounded_as_in_a_server(tmp_path: Path) -> None:
    save_warm_model(tmp_path)
    wanted = {"model": str(tmp_path), "warm": "", "dtype": "float32", "threads": 1}
    wanted["row_counts"] = 200
    ours = loaded(wanted, {})["grown_bytes"]
    theirs = loaded(wanted, dict.fromkeys(CAPACITIES, "1024"))["grown_bytes"]

    assert 2 * ours < theirs
    grown = {GROWN["row_counts_mib"]: [{**load(2.0, 412), "grown_bytes": 3 * MIB}]}
    figures = figures_of(each_way(grown, load(2.0, 412)))
    assert (figures["row_counts_mib"], figures["row_counts_unbounded_mib"]) == (3.0, 7.0)


def test_a_peak_counts_above_what_was_before_and_without_the_pool_in_use() -> None:
    ways = {way: [load(2.0, 412), load(2.0, 432)] for way in WAYS}
    figures = figures_of(each_way(ways, load(2.0, 442)))

    assert figures["peak_over_weights_safetensors"] == 1.3
    assert figures["peak_over_weights_gguf_from_import"] == 1.4
    parts = figures["mib"]["gguf_cached"]
    assert (parts["weights"], parts["pool"], parts["rest_at_peak"]) == (100, 8, 30)
    assert (parts["anonymous_after"], parts["file_after"]) == (90, 30)


def test_a_ratio_is_the_median_of_ratios_within_a_round() -> None:
    times = {"safetensors": (1.0, 2.0, 4.0), "gguf_cached": (3.0, 3.0, 4.0)}
    times["gguf_first"] = (5.0, 20.0, 16.0)
    ways = {way: [load(s, 420) for s in times[way]] for way in WAYS}
    figures = figures_of(each_way(ways, load(9.0, 420)))

    assert (figures["load_ratio_gguf_cached"], figures["load_ratio_gguf_first"]) == (1.5, 5.0)


def test_a_peak_that_could_not_be_reset_is_a_fault() -> None:
    assert not faults_of({"loads": {"safetensors": [load(1.0, 400)]}})
    assert faults_of({"loads": {"gguf_first": [load(1.0, 400, reset=False)]}})
