"""Tombstones: how a transfer ended is known for a while, and never changes."""

from __future__ import annotations

from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.tombstones import Tombstones

ONE, TWO = TransferKey("t", 1), TransferKey("t", 2)


def test_an_end_is_remembered_for_its_time() -> None:
    stones: Tombstones[str] = Tombstones(60.0, 10)
    stones.add(ONE, "finished", 100.0)
    assert stones.get(ONE, 159.9) == "finished"
    assert stones.get(ONE, 160.0) is None
    assert len(stones) == 0


def test_a_transfer_ends_once() -> None:
    stones: Tombstones[str] = Tombstones(60.0, 10)
    stones.add(ONE, "failed", 100.0)
    stones.add(ONE, "finished", 130.0)
    assert stones.get(ONE, 140.0) == "failed"
    assert stones.get(ONE, 161.0) is None, "a second end does not renew it"


def test_after_it_was_forgotten_the_key_is_new() -> None:
    stones: Tombstones[str] = Tombstones(60.0, 10)
    stones.add(ONE, "failed", 100.0)
    stones.add(ONE, "finished", 170.0)
    assert stones.get(ONE, 171.0) == "finished"


def test_the_newest_attempt_is_known() -> None:
    stones: Tombstones[str] = Tombstones(60.0, 10)
    assert stones.newest("t", 0.0) == 0
    stones.add(ONE, "superseded", 0.0)
    assert stones.newest("t", 1.0) == 1
    stones.add(TWO, "finished", 30.0)
    assert stones.newest("t", 59.0) == 2
    assert stones.get(ONE, 61.0) is None
    assert stones.newest("t", 61.0) == 2, "attempt 1 is forgotten, attempt 2 is not"
    assert stones.newest("t", 91.0) == 0


def test_there_are_so_many_and_the_oldest_go_first() -> None:
    stones: Tombstones[int] = Tombstones(60.0, 3)
    keys = [TransferKey(f"t{i}", 1) for i in range(5)]
    for i, key in enumerate(keys):
        stones.add(key, i, float(i))
    assert len(stones) == 3
    assert [stones.get(key, 5.0) for key in keys] == [None, None, 2, 3, 4]
    assert [stones.newest(key.transfer_id, 5.0) for key in keys] == [0, 0, 1, 1, 1]
