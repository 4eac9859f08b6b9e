"""What preparing costs P beyond time: threads, memory, and chunks computed for nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pd_grpc.bench.door import Manners
from pd_grpc.bench.processes import WorkerLost
from pd_grpc.bench.scope import Scope
from pd_grpc.bench.seed_run import Tell
from pd_grpc.bench.setup import Row, Setup, Timing
from pd_grpc.bench.system import Group, System, running_system
from pd_grpc.bench.workload import Length

IN_PREPARATION = 256
FEW = 32
"""What P grows by with the first requests alone, whatever they are, is there with so many."""
_HOLD_S = 3.0
_LOOK_S = 0.05
_PATIENCE_S = 30.0
# As short as a prompt can be, so that what it weighs is not its tokens.
_SHORT = Length(1, 2)
_CHUNK_TOKENS = 64
_CHUNKS = 16
_CANCEL_AT = 4


async def footprint_figures(scope: Scope, tell: Tell) -> Mapping[str, Any]:
    """`prepare_threads`, `prepare_bytes_per_request` and `cancel_wasted_chunks`."""
    setup = Setup(
        Row.POOL,
        Timing(1.0, floor_ms=scope.floor_ms),
        # No D has more in flight than the total has left.
        prefill_settings={"prepare_window": IN_PREPARATION, "prepare_total": 2 * IN_PREPARATION},
    )
    async with running_system(setup) as system:
        await system.behave(0, Manners(silent=True))
        idle = await system.prefills[0].do("stats")
        # Freed memory is kept and used again, so that many must come after a few: after as many
        # they would seem to weigh nothing.
        few = await _hold(system, FEW)
        busy = await _hold(system, IN_PREPARATION)
    per_request = (busy["rss_bytes"] - few["rss_bytes"]) / (IN_PREPARATION - FEW)
    wasted = await _wasted_chunks(scope)
    tell(
        f"{busy['threads']} threads and {per_request / 1024:.1f} KiB a request with "
        f"{IN_PREPARATION} in preparation; a cancel wastes {wasted} chunks"
    )
    return {
        "prepare_threads": busy["threads"],
        "prepare_threads_idle": idle["threads"],
        "prepare_bytes_per_request": max(0.0, per_request),
        "cancel_wasted_chunks": wasted,
    }


async def _hold(system: System, many: int) -> Mapping[str, Any]:
    """Bring so many into preparation, look at P, and cancel them."""
    group = {"held": Group(system.requests([_SHORT] * many), many)}
    driving = asyncio.create_task(system.closed(group, _HOLD_S))
    stats = await _until(system, lambda found: found["in_preparation"] >= many)
    await driving
    await _until(system, lambda found: found["in_preparation"] == 0)
    return stats


async def _until(system: System, holds: Any) -> Mapping[str, Any]:
    """P's figures once they are as wanted. WorkerLost when they never are."""
    until = time.monotonic() + _PATIENCE_S
    while not holds(found := await system.prefills[0].do("stats")):
        if time.monotonic() > until:
            raise WorkerLost(f"P does not come to what is measured: {found}")
        await asyncio.sleep(_LOOK_S)
    return dict(found)


async def _wasted_chunks(scope: Scope) -> int:
    """Chunks computed of a prompt after its caller has left; the one that runs then counts."""
    setup = Setup(
        Row.POOL,
        Timing(1.0, floor_ms=scope.floor_ms),
        settings={"block_size": _CHUNK_TOKENS, "chunk_tokens": _CHUNK_TOKENS},
    )
    async with running_system(setup) as system:
        before = (await system.prefills[0].do("stats"))["chunks"]
        (request,) = system.requests([Length(_CHUNKS * _CHUNK_TOKENS, 2)])
        tokens = await system.driver.do(
            "cancel", request=asdict(request), tokens=_CANCEL_AT * _CHUNK_TOKENS
        )
        # Once its blocks are back no step touches them.
        await system.settle()
        after = (await system.prefills[0].do("stats"))["chunks"]
    return int(after - before - tokens // _CHUNK_TOKENS)
