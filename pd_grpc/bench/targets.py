"""The figures to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A figure with the least or the most it may be."""

    figure: str
    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        """Whether a value will do."""
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    def __str__(self) -> str:
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


TARGETS = (
    Target("pool_over_bound", most=1.02),
    Target("pool_over_zmq_serial", most=1.0),
    Target("pool_over_zmq_threads5", most=1.0),
    Target("pool_over_zmq_async", most=1.01),
    Target("full_d_ratio_pool", least=0.95),
    Target("silent_d_ratio_pool", least=0.95),
    Target("slow_d_ratio_pool", least=0.95),
    Target("rate_100ms_over_0ms", least=0.9),
    Target("overload_goodput_ratio", least=0.9),
    Target("prepare_threads", most=12),
    Target("prepare_bytes_per_request", most=64 * 1024),
    Target("cancel_wasted_chunks", most=1),
)


def judged(figures: Mapping[str, Any]) -> dict[str, bool]:
    """Whether each target of whose figure there is one is met, by the name of its figure."""
    return {
        target.figure: target.met(figures[target.figure])
        for target in TARGETS
        if target.figure in figures
    }
