"""The benchmark of moving KV: what our transports cost beside what others would do.

The ways take turns, in an order that changes from round to round, and a ratio is made within a
round, so that what slows the machine down for a while slows both. Every block that has landed is
compared with what was sent: a rate of wrong bytes does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from pd_grpc.bench.endurance.report import made_on
from pd_grpc.bench.kv.decoding import Stretches, bench_decoding
from pd_grpc.bench.kv.figures import HEADLINE_MIB, READING, TARGETS, moving_figures
from pd_grpc.bench.kv.legs import Leg
from pd_grpc.bench.kv.moving import FAILURES, move
from pd_grpc.bench.kv.ours import left_out
from pd_grpc.bench.kv.overlap import Overlap, bench_overlap
from pd_grpc.bench.kv.pool import LAYOUT
from pd_grpc.bench.kv.ways import TRANSPORTS, WAYS
from pd_grpc.bench.statistics import METHOD
from pd_grpc.protocol.config import DecodeConfig

Tell = Callable[[str], None]
Report = dict[str, Any]

_PACKAGES = ("torch", "pyzmq", "google-crc32c", "numpy")


@dataclass(frozen=True)
class KvScope:
    """How much is run."""

    quick: bool = False
    sizes_mib: Sequence[int] = (1, 4, 16, 64, 256, 1024)
    rounds: int = 9
    """Of all amounts, as many as are begun within `moving_s`, but three at the least."""
    moving_s: float = 13 * 60.0
    decoding_rounds: int = 5
    decoding_s: float = 10.0
    overlap_rounds: int = 5
    overlap_s: float = 4.0

    @classmethod
    def of(cls, quick: bool) -> KvScope:
        """All of it, in 20 minutes at the most, or the same figures within two."""
        return cls(True, (1, 16, HEADLINE_MIB), 3, 60.0, 2, 4.0, 1, 2.0) if quick else cls()


@dataclass
class _Found:
    """What a run has found so far."""

    scope: KvScope
    missing: Mapping[str, str]
    began: float = field(default_factory=time.monotonic)
    before: tuple[float, float, float] = field(default_factory=os.getloadavg)
    legs: list[list[Leg]] = field(default_factory=list)
    stretches: Stretches = field(default_factory=Stretches)
    overlap: Overlap = field(default_factory=Overlap)
    failures: list[str] = field(default_factory=list)

    def report(self, complete: bool) -> Report:
        """As one JSON object; figures that there are not are null."""
        figures = moving_figures(self.legs) | self.overlap.figures() | self.stretches.figures()
        about = made_on()
        about["versions"] |= {name: metadata.version(name) for name in _PACKAGES}
        about["load_average"] = {"before": self.before, "after": os.getloadavg()}
        config = DecodeConfig()
        return {
            "benchmark": "kv",
            "complete": complete,
            "failures": list(self.failures),
            "compares": {name: way.description for name, way in WAYS.items()},
            "left_out": dict(self.missing),
            "reading": READING,
            **figures,
            "targets": {target.figure: str(target) for target in TARGETS},
            "targets_met": {
                target.figure: target.met(figures[target.figure])
                for target in TARGETS
                if figures[target.figure] is not None
            },
            "layout": {"block_bytes": LAYOUT.block_bytes, "layer_bytes": LAYOUT.layer_bytes(0)},
            "settings": {
                "chunk_bytes": config.chunk_bytes,
                "send_window_bytes": config.send_window_bytes,
            },
            "scope": asdict(self.scope),
            "intervals": METHOD,
            "took_s": time.monotonic() - self.began,
            **about,
        }


async def bench_kv(
    scope: KvScope, tell: Tell, keep: Callable[[Report], None] = lambda report: None
) -> Report:
    """The figures, as one JSON object; `keep` gets those so far after every round and part. What
    fails is named in them, and ends no other part."""
    found = _Found(scope, left_out())
    transports = [name for name in TRANSPORTS if name not in found.missing]
    tell("filling pools")
    moving = move(scope.sizes_mib, scope.rounds, scope.moving_s, transports, found.failures, tell)
    async with aclosing(moving):
        async for legs in moving:
            found.legs += legs
            keep(found.report(complete=False))
    try:
        await bench_decoding(scope.decoding_rounds, scope.decoding_s, tell, found.stretches)
    except FAILURES as error:
        found.failures.append(f"a D that decodes: {error}")
    keep(found.report(complete=False))
    try:
        await bench_overlap(scope.overlap_rounds, scope.overlap_s, tell, found.overlap)
    except FAILURES as error:
        found.failures.append(f"sending beside computing: {error}")
    return found.report(complete=True)


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """What makes a run worthless, or a part of it; a target that is missed does not."""
    found = [f"failed: {failure}" for failure in report["failures"]]
    if report["wrong_blocks"]:
        found.append(f"{report['wrong_blocks']} blocks are not what was sent")
    if failed := report["decoding"]["failed"]:
        found.append(f"{failed} answers of the D that decodes were not whole")
    return found
