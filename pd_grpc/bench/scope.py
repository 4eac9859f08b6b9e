"""How much is run: all of it, or what two minutes allow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pd_grpc.bench.seed_model import CONCURRENCY, INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS

FLOOR_MS = 72.30
"""The seed model's free parameter, as `pd-grpc bench calibrate` fits it to the 275 s of the serial
row."""


@dataclass(frozen=True)
class Scope:
    """Sizes of every experiment; times are of the wall unless they say otherwise."""

    quick: bool = False
    repeats: int = 5
    floor_ms: float = FLOOR_MS
    seed_scale: float = 0.5
    """Factor on every step time of the seed workload. What P and D themselves need for a request
    is not scaled: at 0.25 two cores are all busy while the first 256 come, in any row."""
    seed_requests: int = REQUESTS
    seed_at_once: int = CONCURRENCY
    seed_input: int = INPUT_TOKENS
    seed_output: int = OUTPUT_TOKENS
    bad_repeats: int = 3
    bad_window_s: float = 8.0
    latency_repeats: int = 3
    latency_requests: int = 200
    trace: Path | None = None
    trace_minutes: float = 10.0
    trace_speed: float = 4.0
    overload_window_s: float = 20.0

    @classmethod
    def fast(cls, trace: Path | None = None) -> Scope:
        """The same keys within two minutes."""
        return cls(
            quick=True,
            repeats=1,
            seed_scale=0.2,
            seed_requests=96,
            seed_at_once=40,
            seed_output=100,
            bad_repeats=1,
            bad_window_s=3.5,
            latency_repeats=1,
            latency_requests=50,
            trace=trace,
            trace_minutes=0.5,
            overload_window_s=2.0,
        )
