"""D's machine over several shards: what it waits for, and when its blocks come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_grpc.blocks.pool import BlockState
from pd_grpc.decode import events as ev
from pd_grpc.decode.carrier import INLINE_CARRIER, Carrier
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.shards import cut, places_of
from pd_grpc.v1 import layout_pb2
from tests.decode.harness import Harness
from tests.decode.messages import LAYOUT, Request
from tests.decode.prefill_peer import Prefill

INLINE, SHM = layout_pb2.TRANSPORT_INLINE, layout_pb2.TRANSPORT_SHM
STAGES = [place.to_proto() for place in cut(LAYOUT, 1, 2)]
MEMORY = Carrier(SHM, one_sided=True, metadata=b"how to get there")


@pytest.fixture
def d() -> Iterator[Harness]:
    made = Harness(shards=STAGES, carriers=(MEMORY, INLINE_CARRIER))
    yield made
    made.all_returned()


def quarantined(d: Harness) -> int:
    return d.pool.counts()[BlockState.QUARANTINED]


def granted(d: Harness, p: Prefill) -> str:
    return d.bring(p, Request(), S.RECEIVING)


def test_f58_ready_only_when_every_shard_is_complete(d: Harness) -> None:
    p, request = Prefill(d), Request()
    client = d.generate(request)
    grant = granted(d, p)
    d.complete_on(1, grant)
    d.complete_on(1, grant)
    assert d.state() is S.RECEIVING and not d.transfer().kv_complete
    assert d.machine.ledger.cache.find([b"x"]) == []
    d.complete(grant, request.tokens)
    assert d.state() is S.READY
    p.first_token(request, grant)
    d.run()
    assert d.shown[client] == request.answer


def test_nothing_is_kept_for_others_before_every_shard_is_complete(d: Harness) -> None:
    """Invariant 9."""
    p, request = Prefill(d), Request(prompt=list(range(100, 109)))
    d.generate(request)
    grant = d.bring(p, request, S.RECEIVING)
    d.complete_on(1, grant)
    assert not d.pool.kept()
    d.complete(grant, request.tokens)
    assert d.pool.kept()
    p.first_token(request, grant)
    d.run()


@pytest.mark.parametrize("complete", [False, True])
def test_one_shard_that_fails_fails_the_transfer_on_all(d: Harness, complete: bool) -> None:
    p, request = Prefill(d), Request()
    client = d.generate(request)
    grant = granted(d, p)
    if complete:
        d.complete_on(0, grant)
    d.feed(ev.ReceiveFailed(grant, Fault(Reason.KV_CORRUPT, "the last layer"), 1))
    assert d.reason(client) is Reason.KV_CORRUPT
    assert d.closes[grant].reason is Reason.KV_CORRUPT


def test_blocks_come_back_when_every_shard_has_closed(d: Harness) -> None:
    """Invariant 4."""
    p = Prefill(d)
    grant = granted(d, p)
    d.holds_closes = True
    p.release(Request())
    held = quarantined(d)
    assert held == 2
    d.feed(ev.ReceiveClosed(grant, 1))
    assert quarantined(d) == held
    d.feed(ev.ReceiveClosed(grant, 1))
    assert quarantined(d) == held
    d.feed(ev.ReceiveClosed(grant, 0))
    assert quarantined(d) == 0


def test_a_shard_that_is_complete_may_still_be_written_to(d: Harness) -> None:
    p = Prefill(d)
    grant = granted(d, p)
    d.complete_on(0, grant)
    d.holds_closes = True
    p.release(Request())
    assert quarantined(d) == 2
    d.close_receivers()
    assert quarantined(d) == 0


def test_with_several_shards_p_writes_to_none(d: Harness) -> None:
    d.feed(ev.WriterAttached(Owner("p", 10)))
    p = Prefill(d, transports=[SHM, INLINE])
    welcome = d.told[p.stream][0].welcome
    assert welcome.transport == INLINE
    assert list(welcome.shards) == STAGES


def test_a_p_with_several_shards_writes_to_none() -> None:
    d = Harness(carriers=(MEMORY, INLINE_CARRIER))
    p = Prefill(d, transports=[SHM, INLINE], shards=STAGES)
    assert d.told[p.stream][0].welcome.transport == INLINE
    grant = d.bring(p, Request(), S.RESERVED)
    assert d.opened[grant].senders == places_of(STAGES, LAYOUT)
    p.release(Request())
    d.all_returned()
