"""What is run: the engine's steps, the servers' settings, the way Allocate is carried."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pd_grpc.bench.seed_model import seed_steps
from pd_grpc.engine.splitwise_steps import SPLITWISE
from pd_grpc.engine.step_table import StepTable


class Row(str, enum.Enum):
    """The ways to prepare that are compared; nothing else differs between them."""

    ZMQ_SERIAL = "zmq_serial"
    ZMQ_THREADS5 = "zmq_threads5"
    ZMQ_ASYNC = "zmq_async"
    POOL = "pool"
    BOUND = "bound"


DESCRIPTIONS: Mapping[Row, str] = {
    Row.ZMQ_SERIAL: "DEALER/ROUTER, pickled dicts, reply polled every 1 ms of wall time, "
    "one after another",
    Row.ZMQ_THREADS5: "as zmq_serial in five threads",
    Row.ZMQ_ASYNC: "asyncio DEALER, pickled dicts, as many at once as the pool's windows let",
    Row.POOL: "gRPC futures: the prepare pool",
    Row.BOUND: "grants fetched from D before the clock starts, so that preparing costs nothing",
}

THREADS = {Row.ZMQ_SERIAL: 1, Row.ZMQ_THREADS5: 5}


@dataclass(frozen=True)
class Timing:
    """Step times: the seed's model with a host of `floor_ms`, or a table of `splitwise_steps` by
    name; both `scale` times as long."""

    scale: float
    floor_ms: float = 0.0
    splitwise: str = ""

    @property
    def steps(self) -> StepTable:
        """The unscaled table. KeyError for a table that is not there."""
        return SPLITWISE[self.splitwise] if self.splitwise else seed_steps(self.floor_ms)


@dataclass(frozen=True)
class Setup:
    """A system to be started. `settings` are those of P and D, `prefill_settings` of P alone, by
    the names of their configuration."""

    row: Row
    timing: Timing
    prefills: int = 1
    decodes: int = 1
    router: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefill_settings: Mapping[str, Any] = field(default_factory=dict)

    def common(self) -> dict[str, Any]:
        """What every engine's worker is told, as JSON can carry it."""
        return {"timing": asdict(self.timing), "settings": {**SETTINGS, **self.settings}}


SETTINGS: Mapping[str, Any] = {
    "engine": "sim",
    # Large, for the sake of D's own work for a step, which must fit into a scaled one.
    "block_size": 256,
    "num_blocks": 10_000,
    "max_batch": 256,
    "chunk_tokens": 8192,
    # What is compared sends and computes every prompt whole, however often it comes.
    "prefix_cache": 0.0,
    "log_level": "error",
    # Longer than any run: a scaled system must not meet unscaled timers. But for `attach_s`, which
    # ends what was handed over for a client that had left before its own leg came.
    "request_budget_s": 1200.0,
    "lease_s": 1200.0,
    "attach_s": 5.0,
    "kv_progress_s": 600.0,
    "first_token_s": 600.0,
}
"""Of every P and D, unless an experiment says otherwise."""
