"""What the legs say: rates, their ratios and how sure they are, and the figures to reach."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pd_grpc.bench.kv.legs import Case, Leg
from pd_grpc.bench.kv.pool import MIB
from pd_grpc.bench.kv.ways import TRANSPORTS
from pd_grpc.bench.statistics import estimate
from pd_grpc.bench.targets import Target

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
    "shm_over_memcpy_one_thread": ("shm", "memcpy_one_thread"),
    "nixl_over_tcp": ("nixl", "tcp"),
}
"""Of the rates of two ways; null where one is not built, or is left out."""
FIGURES = (
    *RATIOS,
    "fragmented_over_contiguous",
    "eight_over_one",
    "slowest_over_fastest",
    "peak_mib_per_pair",
    "exposed_over_layer_share",
    "itl_p99_under_transfers",
    "control_p99_under_bulk",
    "itl_p99_beside_bulk_apart",
    "control_p99_beside_bulk_apart",
    "itl_p99_beside_spinning",
    "control_p99_beside_spinning",
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
    "by_transport": "these three of each transport; the figures without one are those of inline",
    "eight_over_one": f"at {HEADLINE_MIB} MiB, rate of {AT_ONCE} at once over that of one",
    "slowest_over_fastest": f"of {AT_ONCE} at once at {HEADLINE_MIB} MiB; the median of the rounds",
    "exposed_over_layer_share": "2,048 tokens on sim over a link on which their KV takes as long as"
    " their layers: from the end of compute to the last ack, over the time of one layer",
    "itl_p99_under_transfers": "99th percentile of the time between two messages with tokens from "
    "a D that decodes four requests, with eight transfers landing over without",
    "control_p99_under_bulk": "the same of GetServerInfo on D's control endpoint, 100 times a "
    "second: `busy` in the same stretches of time over `quiet`",
    "*_beside_bulk_apart": "the same while the transfers land in another D, which decodes nothing: "
    "what a bulk side in a process of its own could bring at the most; `landed_gib_per_s` says how "
    "much landed in either",
    "*_beside_spinning": "the same while two processes compute and do nothing else: what the "
    "scheduler of this machine makes of them",
}
"""What the figures mean; part of the report."""


def moving_figures(rounds: Sequence[Sequence[Leg]]) -> dict[str, Any]:
    """What the legs say, each round of one amount. Figures at another amount than the headline's
    where that was not run: at the largest."""
    legs = [leg for each in rounds for leg in each]
    sizes = {leg.case.mib for leg in legs}
    mib = max(sizes, default=HEADLINE_MIB)
    if HEADLINE_MIB in sizes:
        mib = HEADLINE_MIB
    headline = [
        {leg.case: leg for leg in each} for each in rounds if each and each[0].case.mib == mib
    ]
    figures: dict[str, Any] = {"headline_mib": mib}
    for name, (upper, lower) in RATIOS.items():
        figures |= _ratio(name, headline, Case(upper, mib), Case(lower, mib))
    by_transport = {
        name: _of_transport(headline, name, mib)
        for name in TRANSPORTS
        if any(leg.case.way == name for leg in legs)
    }
    figures |= by_transport.get("inline", _of_transport((), "inline", mib))
    figures["by_transport"] = by_transport
    peaks = [
        (leg.sender_peak_bytes + leg.receiver_peak_bytes) / MIB
        for leg in legs
        if leg.case.way in TRANSPORTS
    ]
    figures["peak_mib_per_pair"] = max(peaks, default=None)
    figures["wrong_blocks"] = sum(leg.wrong for leg in legs)
    figures["rows"] = [
        _row(case, [leg for leg in legs if leg.case == case])
        for case in dict.fromkeys(sorted(leg.case for leg in legs))
    ]
    return figures


def _of_transport(headline: Sequence[Mapping[Case, Leg]], name: str, mib: int) -> dict[str, Any]:
    """What is told of each transport of ours."""
    one, eight = Case(name, mib), Case(name, mib, AT_ONCE)
    figures = _ratio("fragmented_over_contiguous", headline, Case(name, mib, 1, True), one)
    figures |= _ratio("eight_over_one", headline, eight, one)
    spreads = [
        max(each[eight].took_s) / min(each[eight].took_s) for each in headline if eight in each
    ]
    figures["slowest_over_fastest"] = statistics.median(spreads) if spreads else None
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
