"""What D remembers of transfers that have ended goes with its time, however many there may be."""

from __future__ import annotations

import gc
import types
from typing import Any, TypeVar

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from tests.decode.harness import Harness
from tests.decode.messages import Request
from tests.decode.prefill_peer import Prefill
from tests.decode.receiver_shard import Shard

T = TypeVar("T")

_CODE = (type, types.ModuleType, types.FunctionType)


def held(root: Any, kind: type[T]) -> list[T]:
    """Every object of a kind that `root` holds, through whatever."""
    seen = {id(root): root}
    waiting = [root]
    while waiting:
        for each in gc.get_referents(waiting.pop()):
            if id(each) not in seen and not isinstance(each, _CODE):
                seen[id(each)] = each
                waiting.append(each)
    return [each for each in seen.values() if type(each) is kind]


def test_nothing_of_a_transfer_is_left_after_its_tombstone(d: Harness, p: Prefill) -> None:
    for i in range(8):
        request = Request(f"t-{i}")
        client = d.generate(request)
        p.granted(request)
        d.leave(client)
    assert len(held(d.machine, TransferKey)) == 8
    d.advance_alive(p, d.config.tombstone_s)
    last = Request("t-last")
    p.granted(last)
    p.release(last)
    assert held(d.machine, TransferKey) == [TransferKey("t-last", 1)]


def test_a_shard_forgets_a_closed_grant_with_its_tombstone() -> None:
    shard = Shard()
    gone = Fault(Reason.CLIENT_GONE, "left")
    shard.close(gone)
    assert shard.fault(shard.stream()) is gone, "a late stream is told"
    shard.advance(shard.config.tombstone_s)
    shard.grant()
    shard.close(Fault(Reason.RELEASED, "done"))
    assert [fault.reason for fault in held(shard.receiver, Fault)] == [Reason.RELEASED]
