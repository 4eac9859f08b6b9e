"""KV leaves layer by layer while the next layers are computed."""

from __future__ import annotations

from pd_grpc.bench.kv.overlap import bench_overlap

COMPUTE_S = 3.0
AT_MOST = 1.5
"""Shares of one layer that are left to send when computing has ended; all 16 without overlap."""
TRIES = 3
"""On a machine that others use as well the best counts."""


async def test_only_the_last_layer_is_left_to_send_when_computing_has_ended() -> None:
    found: list[float] = []
    while len(found) < TRIES and (not found or min(found) > AT_MOST):
        figures = await bench_overlap(1, COMPUTE_S, print)
        found += figures["overlap"]["over_layer_share"]
        print(figures)
        assert figures["overlap"]["compute_s"][0] >= COMPUTE_S
    assert min(found) <= AT_MOST, found
