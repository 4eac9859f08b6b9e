"""Emptying a pool that nobody holds anything of."""

from __future__ import annotations

from pd_grpc.blocks.pool import BlockPool, BlockState


def assert_whole(pool: BlockPool) -> None:
    """Every block can be had at once, whatever is cached, and is free when it is given back."""
    pool.reserve(pool.total, owner="the test").release()
    assert pool.counts()[BlockState.FREE] == pool.total
