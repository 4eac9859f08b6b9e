"""One load in a process of its own: `python -m pd_grpc.bench.load.child '{"model": ...}'`.

The argument has the fields of an `EngineConfig`, and `warm`, a folder with a model of next to
nothing that is loaded before, or empty for none. With `row_counts` the layers' products are then
run with so many numbers of rows, every second one from 1 on. A line of JSON comes out.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from pd_grpc.engine.load import load_engine
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.servers.onednn import bound_primitives

_KIB = 1024
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_IMPORTED = (
    "pd_grpc.engine.torch",
    "pd_grpc.engine.gguf_weights",
    "transformers.models.llama.modeling_llama",
)


def main(wanted: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one load, and bytes of memory before, at the most and after; the keys are told of
    in `figures`. Linux alone."""
    warm, row_counts = wanted.pop("warm"), wanted.pop("row_counts", 0)
    # As in a server's process.
    bound_primitives(os.environ)
    for name in _IMPORTED:
        import_module(name)
    from pd_grpc.engine.spent_pages import trim_heap
    from pd_grpc.engine.weights import weights_bytes

    if warm:
        load_engine(EngineConfig(model=warm, dtype=wanted["dtype"], num_blocks=16)).close()
    gc.collect()
    trim_heap()
    reset = _reset_peak()
    before = _memory()
    began = time.perf_counter()
    engine: Any = load_engine(EngineConfig(**wanted))
    seconds = time.perf_counter() - began
    after = _memory()
    pool = engine._kv.blocks
    found = {
        "seconds": seconds,
        "peak_is_of_the_load": reset,
        "before": before,
        "after": after,
        "weights_bytes": weights_bytes(engine._model),
        "pool_bytes": pool.nbytes,
        "pool_resident_bytes": _resident(pool.data_ptr(), pool.nbytes),
        "model": engine.name,
        "grown_bytes": _grown(engine, row_counts) if row_counts else None,
    }
    engine.close()
    return found


def _grown(engine: Any, row_counts: int) -> int | None:
    """Bytes that products with so many numbers of rows leave behind, of one layer, for the others
    have the same shapes. None of a model that runs by transformers' own code."""
    from pd_grpc.engine.lean_model import LeanModel
    from pd_grpc.engine.packed_linear import run_with_rows
    from pd_grpc.engine.spent_pages import trim_heap

    forward = engine._passing.forward
    if not isinstance(forward, LeanModel):
        return None
    trim_heap()
    before = _memory()["resident"]
    run_with_rows(forward.linears(), range(1, 2 * row_counts, 2))
    trim_heap()
    return _memory()["resident"] - before


def _memory() -> dict[str, int]:
    """Bytes: resident, the most since the last reset, anonymous, and of files."""
    names = {"VmRSS": "resident", "VmHWM": "peak", "RssAnon": "anonymous", "RssFile": "file"}
    found = {}
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[names[name]] = int(value.split()[0]) * _KIB
    return found


def _reset_peak() -> bool:
    """Have VmHWM begin at what is resident now; whether that was allowed."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def _resident(address: int, length: int) -> int:
    """Bytes of the pages in a range that memory is taken for."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(address + length - start) // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    size = ctypes.c_size_t(address + length - start)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), size, there):
        raise OSError(ctypes.get_errno(), "mincore")
    return min(length, sum(page & 1 for page in there) * mmap.PAGESIZE)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
