"""When blocks of several shards leave quarantine."""

from __future__ import annotations

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.decode.quarantine import PREFILL, Quarantine
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.refs import TransferKey

OWNER = Owner("p", 10)


def test_p_has_stopped_once_every_shard_has_heard_its_end() -> None:
    pool = BlockPool(4)
    quarantine = Quarantine()
    holding = pool.reserve(4, owner="t-1")
    key = TransferKey("t-1", 1)
    quarantine.take("g-1", key, holding, OWNER, {PREFILL}, incomplete={0, 1})

    quarantine.completed("g-1", 1)
    quarantine.completed("g-1", 1)
    assert pool.free == 0, "it may yet write to the first"
    quarantine.completed("g-1", 0)
    assert pool.free == pool.total
    quarantine.completed("g-1", 0)
    pool.check()
