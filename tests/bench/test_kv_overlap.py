"""KV leaves while the next layers are computed, in processes of their own."""

from __future__ import annotations

from pd_grpc.bench.kv.overlap import Overlap, bench_overlap

COMPUTE_S = 2.0
ROUNDS = 3
AT_MOST = 4.0
"""Shares of one layer that are left to send when computing has ended; all 16 without overlap. What
it comes to where nothing else runs is the benchmark's to say, and that no layer waits for the next
one is shown without a clock in `tests/prefill/test_overlap.py`."""


async def test_little_is_left_to_send_when_computing_has_ended() -> None:
    found = Overlap()
    await bench_overlap(ROUNDS, COMPUTE_S, print, found)
    figures = found.figures()
    print(figures)
    assert len(figures["overlap"]["over_layer_share"]) == ROUNDS
    assert min(figures["overlap"]["compute_s"]) >= COMPUTE_S
    assert figures["exposed_over_layer_share"] <= AT_MOST, "the median"
