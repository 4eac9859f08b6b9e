"""P's machine with a D of two shards: what is heard of one says nothing of the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.shards import cut
from pd_grpc.transport.base import Slab
from pd_grpc.v1 import decode_pb2
from tests.prefill.world import D1, GONE, LAYOUT, World, settle

T1 = TransferKey("t-1", 1)
STAGES = cut(LAYOUT, 1, 2)
GRACE_S, KV_PROGRESS_S = 1.0, 10.0


def ack(strand: int) -> ev.KvAcked:
    """One block of the layer that goes to a shard."""
    return ev.KvAcked(T1, strand, [Slab(0, strand, 1, 0, 1)], LAYOUT.layer_bytes(0))


@pytest.fixture
def world() -> Iterator[World]:
    """A request whose KV is on its way over two strands, its first token delivered."""
    made = World()
    made.call(tokens=12)
    made.connect()
    made.grant(places=STAGES)
    made.step()
    made.step()
    made.answer_first_token()
    assert made.state() is PrefillState.SENDING
    yield made
    settle(made)


def opened(world: World) -> list[int]:
    """The strand of each stream so far."""
    return [each.strand for each in world.taken(act.OpenTransfer)]


HEARD = [
    [ack(0)],
    [ev.TransferReopened(T1, 0)],
    [ack(0), ev.TransferCompleted(T1, 0)],
]


@pytest.mark.parametrize("heard", HEARD, ids=["ack", "reopened", "completed"])
def test_a_strand_that_is_reached_again_leaves_the_others_grace_running(
    world: World, heard: list[ev.Event]
) -> None:
    since = world.now
    for strand in (0, 1):
        world.feed(ev.TransferBroken(T1, strand, GONE))
    world.advance(0.1)
    assert opened(world) == [0, 1, 0, 1]
    world.feed(*heard)
    while not world.state().terminal:
        assert world.now < since + 2 * GRACE_S, "shard 1 has never been reached again"
        world.advance(0.1)
    assert since + GRACE_S <= world.now
    assert world.releases() == [(D1, Reason.DECODE_LOST)]


def test_acks_of_one_strand_leave_the_silence_of_the_other_counting(world: World) -> None:
    """Shard 1 is reached and lost again and again; shard 0 acknowledges all the time."""
    since = world.now
    while not world.state().terminal:
        assert world.now < since + 2 * KV_PROGRESS_S
        world.feed(ev.TransferBroken(T1, 1, GONE), ack(0))
        world.advance(0.1)
        world.feed(ev.TransferReopened(T1, 1), ack(0))
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
        world.advance(0.5)
    assert since + KV_PROGRESS_S <= world.now
    assert world.releases() == [(D1, Reason.DECODE_LOST)]


def test_a_strand_that_breaks_is_opened_again_alone_and_both_must_be_complete(
    world: World,
) -> None:
    world.feed(ev.TransferBroken(T1, 1, GONE), ev.TransferCompleted(T1, 0))
    world.advance(0.1)
    assert opened(world) == [0, 1, 1]
    assert world.state() is PrefillState.SENDING
    world.feed(ev.TransferReopened(T1, 1), ack(1))
    world.advance(5 * GRACE_S)
    assert world.state() is PrefillState.SENDING
    world.feed(ev.TransferCompleted(T1, 1))
    assert world.state() is PrefillState.HANDED_OFF
