"""The benchmark of moving KV: what our transports cost beside what others would do.

The ways take turns, in an order that changes from round to round, and a ratio is made within a
round, so that what slows the machine down for a while slows both. Every block that has landed is
compared with what was sent: a rate of wrong bytes does not count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from pd_grpc.bench.endurance.report import made_on
from pd_grpc.bench.kv.decoding import bench_decoding
from pd_grpc.bench.kv.legs import Case, Leg, cases_of, groups, running_pairs
from pd_grpc.bench.kv.overlap import bench_overlap
from pd_grpc.bench.kv.pool import LAYOUT, MIB
from pd_grpc.bench.kv.ways import TRANSPORTS, WAYS
from pd_grpc.bench.statistics import METHOD, estimate
from pd_grpc.bench.targets import Target
from pd_grpc.protocol.config import DecodeConfig

Tell = Callable[[str], None]

HEADLINE_MIB = 256
AT_ONCE = 8
"""Transfers that share an amount, beside one that moves it alone."""

TARGETS = (
    Target("inline_over_bare_grpc", least=0.9),
    Target("inline_over_zmq", least=0.5),
    Target("shm_over_memcpy", least=0.8),
    Target("fragmented_over_contiguous", least=0.8),
    Target("eight_over_one", least=0.9),
    Target("slowest_over_fastest", most=1.3),
    Target("peak_mib_per_pair", most=64),
    Target("exposed_over_layer_share", most=1.5),
    Target("itl_p99_under_transfers", most=1.3),
    Target("control_p99_under_bulk", most=3),
)
RATIOS: Mapping[str, tuple[str, str]] = {
    "inline_over_bare_grpc": ("inline", "bare_grpc"),
    "inline_over_zmq": ("inline", "zmq"),
    "inline_over_tcp": ("inline", "tcp"),
    "inline_over_bare_grpc_dropped": ("inline", "bare_grpc_dropped"),
    "inline_over_zmq_dropped": ("inline", "zmq_dropped"),
    "shm_over_memcpy": ("shm", "memcpy"),
    "nixl_over_tcp": ("nixl", "tcp"),
}
"""Of the rates of two ways; null where one is not built."""
FIGURES = (
    *RATIOS,
    "fragmented_over_contiguous",
    "eight_over_one",
    "slowest_over_fastest",
    "peak_mib_per_pair",
    "exposed_over_layer_share",
    "itl_p99_under_transfers",
    "control_p99_under_bulk",
    "wrong_blocks",
    "took_s",
)
"""Of the report, those to be shown."""
READING: Mapping[str, str] = {
    "gib_per_s": "bytes over the time until the last of them was there, as the sender hears it; of "
    "memcpy, until the copy returned",
    "at_once": "transfers that share the amount equally and begin together",
    "*_dropped": "the receiver lets go of what comes: no way to move KV, for it must be put "
    "somewhere, but what these tools are usually timed at",
    "fragmented": "each block of either pool anywhere in it; contiguous is one run",
    "cpu_s_per_gib": "CPU of all threads of either process",
    "peak_mib": "of either process, resident at the most during a leg beyond what was when its "
    "pool had just been filled; what malloc keeps of earlier legs counts",
    "peak_mib_per_pair": "the greatest of both together, over every amount",
    "eight_over_one": f"at {HEADLINE_MIB} MiB, rate of {AT_ONCE} at once over that of one",
    "slowest_over_fastest": f"of {AT_ONCE} at once at {HEADLINE_MIB} MiB; the median of the rounds",
    "exposed_over_layer_share": "2,048 tokens on sim over a link on which their KV takes as long as"
    " their layers: from the end of compute to the last ack, over the time of one layer",
    "itl_p99_under_transfers": "99th percentile of the time between two messages with tokens from "
    "a D that decodes four requests, with eight transfers landing over without",
    "control_p99_under_bulk": "the same of GetServerInfo on D's control endpoint, 100 times a "
    "second: `busy` in the same stretches of time over `quiet`",
}
"""What the figures mean; part of the report."""
_PACKAGES = ("torch", "pyzmq", "google-crc32c", "numpy")


@dataclass(frozen=True)
class KvScope:
    """How much is run."""

    quick: bool = False
    sizes_mib: Sequence[int] = (1, 4, 16, 64, 256, 1024)
    rounds: int = 9
    decoding_rounds: int = 6
    decoding_s: float = 10.0
    overlap_rounds: int = 5
    overlap_s: float = 4.0

    @classmethod
    def of(cls, quick: bool) -> KvScope:
        """All of it, or the same figures within two minutes."""
        return cls(True, (1, 16, HEADLINE_MIB), 3, 2, 4.0, 1, 2.0) if quick else cls()


async def bench_kv(scope: KvScope, tell: Tell) -> dict[str, Any]:
    """The figures, as one JSON object. WorkerLost."""
    began, before = time.monotonic(), os.getloadavg()
    legs: list[list[Leg]] = []
    number = 0
    tell("filling pools")
    async with running_pairs(groups(), max(scope.sizes_mib), {}) as pairs:
        for mib in scope.sizes_mib:
            cases = cases_of(mib, AT_ONCE, list(TRANSPORTS))
            for turn in range(scope.rounds):
                tell(f"{mib} MiB: round {turn + 1} of {scope.rounds}")
                legs.append([])
                for case in order(cases, turn):
                    number += 1
                    legs[-1].append(await pairs[case.way].run(case, number))
    decoding = await bench_decoding(scope.decoding_rounds, scope.decoding_s, tell)
    overlap = await bench_overlap(scope.overlap_rounds, scope.overlap_s, tell)
    figures = {**moving_figures(legs), **overlap, **decoding}
    about = made_on()
    about["versions"] |= {name: metadata.version(name) for name in _PACKAGES}
    about["load_average"] = {"before": before, "after": os.getloadavg()}
    config = DecodeConfig()
    return {
        "benchmark": "kv",
        "compares": {name: way.description for name, way in WAYS.items()},
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
        "scope": asdict(scope),
        "intervals": METHOD,
        "took_s": time.monotonic() - began,
        **about,
    }


def order(cases: Sequence[Case], turn: int) -> list[Case]:
    """The cases in the order of a round: each begins one now and then, and half of the rounds go
    backwards, so that none always follows the same."""
    at = turn * 3 % len(cases)
    turned = [*cases[at:], *cases[:at]]
    return turned if turn % 4 < 2 else turned[::-1]


def moving_figures(rounds: Sequence[Sequence[Leg]]) -> dict[str, Any]:
    """What the legs say, each round of one amount. Figures at another amount than the headline's
    where that was not run: at the largest."""
    legs = [leg for each in rounds for leg in each]
    sizes = sorted({leg.case.mib for leg in legs})
    mib = HEADLINE_MIB if HEADLINE_MIB in sizes else sizes[-1]
    headline = [
        {leg.case: leg for leg in each} for each in rounds if each and each[0].case.mib == mib
    ]
    figures: dict[str, Any] = {"headline_mib": mib}
    for name, (upper, lower) in RATIOS.items():
        figures |= _ratio(name, headline, Case(upper, mib), Case(lower, mib))
    one, eight = Case("inline", mib), Case("inline", mib, AT_ONCE)
    scattered = Case("inline", mib, fragmented=True)
    figures |= _ratio("fragmented_over_contiguous", headline, scattered, one)
    figures |= _ratio("eight_over_one", headline, eight, one)
    figures["slowest_over_fastest"] = statistics.median(
        max(found[eight].took_s) / min(found[eight].took_s) for found in headline
    )
    figures["peak_mib_per_pair"] = max(
        (leg.sender_peak_bytes + leg.receiver_peak_bytes) / MIB
        for leg in legs
        if leg.case.way in TRANSPORTS
    )
    figures["wrong_blocks"] = sum(leg.wrong for leg in legs)
    figures["rows"] = [
        _row(case, [leg for leg in legs if leg.case == case])
        for case in dict.fromkeys(sorted(leg.case for leg in legs))
    ]
    return figures


def _ratio(
    name: str, rounds: Sequence[Mapping[Case, Leg]], upper: Case, lower: Case
) -> dict[str, Any]:
    ratios = [
        found[upper].gib_per_s / found[lower].gib_per_s
        for found in rounds
        if upper in found and lower in found
    ]
    if not ratios:
        return {name: None}
    made = estimate(ratios)
    return {name: made.median, f"{name}_interval": [made.low, made.high]}


def _row(case: Case, legs: Sequence[Leg]) -> dict[str, Any]:
    rate = estimate([leg.gib_per_s for leg in legs])
    gib = case.mib / 1024
    return {
        **case._asdict(),
        "gib_per_s": rate.median,
        "gib_per_s_interval": [rate.low, rate.high],
        "cpu_s_per_gib": {
            "sender": statistics.median(leg.sender_cpu_s for leg in legs) / gib,
            "receiver": statistics.median(leg.receiver_cpu_s for leg in legs) / gib,
        },
        "peak_mib": {
            "sender": max(leg.sender_peak_bytes for leg in legs) / MIB,
            "receiver": max(leg.receiver_peak_bytes for leg in legs) / MIB,
        },
        "slowest_over_fastest": statistics.median(max(x.took_s) / min(x.took_s) for x in legs),
        "rounds": len(legs),
    }


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """What makes a run worthless; a target that is missed does not."""
    found = []
    if report["wrong_blocks"]:
        found.append(f"{report['wrong_blocks']} blocks are not what was sent")
    if failed := report["decoding"]["failed"]:
        found.append(f"{failed} answers of the D that decodes were not whole")
    return found
