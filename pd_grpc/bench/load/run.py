"""The benchmark of loading: a GGUF file beside the same weights in safetensors.

Each load is a process of its own; the ways take turns within a round, so that what slows the
machine down for a while slows all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pd_grpc.bench.endurance.report import made_on
from pd_grpc.bench.load.figures import (
    FROM_IMPORT,
    GROWN,
    READING,
    ROW_COUNTS,
    TARGETS,
    WAYS,
    figures_of,
)
from pd_grpc.bench.processes import WorkerLost
from pd_grpc.servers.onednn import CAPACITIES

Tell = Callable[[str], None]
Report = dict[str, Any]

_LOAD_S = 120.0
# As small as a pool can be: a larger one is made when the peak is over, and would hide it.
_BLOCKS = 2
_TOKENS = 32
# What torch and oneDNN have where nothing is said.
_UNBOUNDED = dict.fromkeys(CAPACITIES, "1024")
_PACKAGES = ("torch", "transformers", "gguf", "tokenizers")


@dataclass(frozen=True)
class LoadScope:
    """How much is run, of what; `model` is a GGUF file or what has one."""

    quick: bool = False
    rounds: int = 5
    model: str = "smollm2"
    dtype: str = "bfloat16"
    threads: int = 0
    """Of torch; 0 leaves its own default."""

    @classmethod
    def of(cls, quick: bool) -> LoadScope:
        """All of it, some two minutes of SmolLM2 on two cores, or the same figures within one."""
        return cls(True, 2) if quick else cls()


async def bench_load(scope: LoadScope, tell: Tell) -> Report:
    """The figures, as one JSON object. ModelError when the model is no GGUF file; WorkerLost when a
    load fails or takes longer than two minutes."""
    began, average = time.monotonic(), os.getloadavg()
    every = (*WAYS, *FROM_IMPORT, *GROWN.values())
    loads: dict[str, list[dict[str, Any]]] = {way: [] for way in every}
    with tempfile.TemporaryDirectory(prefix="pd-grpc-load-") as name:
        folder = Path(name)
        tell("writing safetensors")
        # Here, for torch takes seconds to import.
        from pd_grpc.engine.saved_models import save_safetensors, save_warm_model

        plain, warm, cache = folder / "plain", folder / "warm", folder / "cache"
        save_safetensors(scope.model, scope.dtype, plain)
        save_warm_model(warm)
        common = {
            "warm": str(warm),
            "dtype": scope.dtype,
            "threads": scope.threads,
            "num_blocks": _BLOCKS,
            "max_model_len": _TOKENS,
        }
        gguf = {"model": scope.model, "weight_cache": str(cache)}
        ways = {
            # Into an empty cache, where gguf_cached finds what it has put there.
            "gguf_first": gguf,
            "safetensors": {"model": str(plain)},
            "gguf_cached": gguf,
        }
        for number in range(scope.rounds):
            for path in cache.glob("*"):
                path.unlink()
            for way, options in ways.items():
                tell(f"round {number + 1} of {scope.rounds}, {way}")
                loads[way].append(await _load({**common, **options}))
        for way in FROM_IMPORT:
            tell(f"{way}, once")
            options = ways[way.removesuffix("_from_import")]
            more = {"warm": "", "row_counts": ROW_COUNTS if way in GROWN.values() else 0}
            loads[way].append(await _load({**common, **options, **more}))
        tell("with as many products kept as the libraries do")
        more = {"warm": "", "row_counts": ROW_COUNTS}
        wanted = {**common, **ways["safetensors"], **more}
        loads["unbounded"].append(await _load(wanted, _UNBOUNDED))
    figures = figures_of(loads)
    about = made_on()
    about["versions"] |= {name: metadata.version(name) for name in _PACKAGES}
    about["load_average"] = {"before": average, "after": os.getloadavg()}
    return {
        "benchmark": "load",
        "reading": READING,
        **figures,
        "targets": {target.figure: str(target) for target in TARGETS},
        "targets_met": {t.figure: t.met(figures[t.figure]) for t in TARGETS},
        "model": loads["gguf_first"][0]["model"],
        "scope": asdict(scope),
        "loads": loads,
        "took_s": time.monotonic() - began,
        **about,
    }


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """What makes a run worthless; a target that is missed does not."""
    loads = [load for found in report["loads"].values() for load in found]
    if not all(load["peak_is_of_the_load"] for load in loads):
        return ["/proc/self/clear_refs could not be written: a peak may be older than its load"]
    return []


async def _load(wanted: Mapping[str, Any], told: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`told` is added to the environment."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pd_grpc.bench.load.child",
        json.dumps(wanted),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(told or {})},
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), _LOAD_S)
    except asyncio.TimeoutError:
        raise WorkerLost(f"loading {wanted['model']} took over {_LOAD_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise WorkerLost(f"loading {wanted['model']} failed: {errors.decode()[-2000:]}")
    found: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return found
