"""The benchmark of loading: a real load in a process of its own, and what is made of several."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("psutil")

from pd_grpc.bench.load.figures import FIGURES, FROM_IMPORT, TARGETS, WAYS, figures_of
from pd_grpc.bench.load.run import faults_of
from pd_grpc.engine.saved_models import save_warm_model

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
    }


@pytest.mark.skipif(sys.platform != "linux", reason="memory is told by /proc")
def test_a_load_in_a_process_of_its_own_tells_its_time_and_memory(tmp_path: Path) -> None:
    save_warm_model(tmp_path)
    wanted = {"model": str(tmp_path), "warm": str(tmp_path), "dtype": "float32", "threads": 1}
    done = subprocess.run(
        [sys.executable, "-m", "pd_grpc.bench.load.child", json.dumps(wanted)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found = json.loads(done.stdout)

    # Embedding and head, then of two layers queries, keys, values, out, the MLP, and all norms.
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    assert found["weights_bytes"] == 4 * (2 * 257 * 64 + 2 * layer + 64)
    assert 0 <= found["pool_resident_bytes"] <= found["pool_bytes"]
    assert found["seconds"] > 0
    assert found["after"]["peak"] >= found["after"]["resident"] > 0
    every = {way: [{**found, "model": "tiny"}] for way in (*WAYS, *FROM_IMPORT)}
    figures = figures_of(every)
    assert set(FIGURES) - set(figures) == {"took_s"}
    assert {target.figure for target in TARGETS} <= set(figures)
    assert figures["load_ratio_gguf_cached"] == figures["load_ratio_gguf_first"] == 1.0
    json.dumps(figures)


def test_a_peak_counts_above_what_was_before_and_without_the_pool_in_use() -> None:
    ways = {way: [load(2.0, 412), load(2.0, 432)] for way in WAYS}
    figures = figures_of(ways | {way: [load(2.0, 442)] for way in FROM_IMPORT})

    assert figures["peak_over_weights_safetensors"] == 1.3
    assert figures["peak_over_weights_gguf_from_import"] == 1.4
    parts = figures["mib"]["gguf_cached"]
    assert (parts["weights"], parts["pool"], parts["rest_at_peak"]) == (100, 8, 30)
    assert (parts["anonymous_after"], parts["file_after"]) == (90, 30)


def test_a_ratio_is_the_median_of_ratios_within_a_round() -> None:
    times = {"safetensors": (1.0, 2.0, 4.0), "gguf_cached": (3.0, 3.0, 4.0)}
    times["gguf_first"] = (5.0, 20.0, 16.0)
    ways = {way: [load(s, 420) for s in times[way]] for way in WAYS}
    figures = figures_of(ways | {way: [load(9.0, 420)] for way in FROM_IMPORT})

    assert (figures["load_ratio_gguf_cached"], figures["load_ratio_gguf_first"]) == (1.5, 5.0)


def test_a_peak_that_could_not_be_reset_is_a_fault() -> None:
    assert not faults_of({"loads": {"safetensors": [load(1.0, 400)]}})
    assert faults_of({"loads": {"gguf_first": [load(1.0, 400, reset=False)]}})
