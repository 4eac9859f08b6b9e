"""A bulk side that goes silent: what it fails, and when it is trusted again."""

from __future__ import annotations

import asyncio
import threading

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.server import PrefillServer
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import Slab
from pd_grpc.v1 import decode_pb2
from tests.prefill.cluster import answer_to, request_to, running
from tests.prefill.world import BLOCK, D1, LAYOUT, World, settle
from tests.waiting import LIMIT_S, until

T1 = TransferKey("t-1", 1)


def wait(world: World, seconds: float) -> None:
    """Let time pass while D's session lives."""
    for _ in range(int(seconds)):
        world.advance(1)
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())


def ack(world: World, blocks: int) -> None:
    """The shard has verified the first blocks."""
    slabs = [Slab(0, 0, 2, 0, blocks)]
    world.feed(ev.KvAcked(T1, 0, slabs, blocks * LAYOUT.block_bytes))


def sending(no_progress_s: float = 30) -> tuple[World, int]:
    """A request that is computed and has its first token delivered."""
    world = World(no_progress_s=no_progress_s)
    call = world.bring_to(PrefillState.SENDING, budget_s=1000)
    world.answer_first_token()
    return world, call


def test_a_silent_sender_fails_its_requests_and_nothing_new_is_taken() -> None:
    world, call = sending()
    wait(world, 29)
    assert world.state() is PrefillState.SENDING
    wait(world, 2)
    assert world.fault(call).reason is Reason.SENDER_STUCK
    assert world.releases() == [(D1, Reason.SENDER_STUCK)]
    assert len(world.taken(act.SenderStuck)) == 1
    assert world.fault(world.call("t-2")).reason is Reason.SENDER_STUCK
    settle(world)


def test_a_sender_that_says_anything_again_is_trusted_again() -> None:
    world, _ = sending()
    wait(world, 31)
    world.confirm_closed()
    assert len(world.taken(act.SenderAlive)) == 1
    world.call("t-2")
    assert world.state("t-2") is PrefillState.ALLOCATING
    settle(world)


def test_every_word_of_the_sender_begins_the_time_anew() -> None:
    world, call = sending()
    for blocks in range(3):
        wait(world, 20)
        ack(world, blocks + 1)
    world.complete()
    assert world.emitted(call)[-1] == "OK"
    wait(world, 60)
    assert world.taken(act.SenderStuck) == []
    settle(world)


def test_a_sender_that_owes_nothing_may_be_silent() -> None:
    world = World(no_progress_s=30)
    world.bring_to(PrefillState.COMPUTING, budget_s=1000)
    computed_blocks = 8 // BLOCK
    wait(world, 20)
    world.step()
    ack(world, computed_blocks)
    # All that is computed is acknowledged; the next chunk takes long, but not too long.
    wait(world, 25)
    assert world.taken(act.SenderStuck) == []
    settle(world)


def test_computed_kv_that_is_not_acknowledged_is_owed() -> None:
    world = World(no_progress_s=30)
    world.bring_to(PrefillState.COMPUTING, budget_s=1000)
    world.step()
    wait(world, 10)
    ack(world, 1)
    wait(world, 25)
    assert world.taken(act.SenderStuck) == []
    world.step()
    wait(world, 6)
    assert len(world.taken(act.SenderStuck)) == 1
    settle(world)


def test_a_request_that_needs_no_kv_outlives_a_stuck_sender() -> None:
    world, _ = sending()
    wait(world, 20)
    other = world.call("t-2", max_tokens=1)
    world.grant("t-2")
    wait(world, 11)
    world.step()
    world.answer_first_token(transfer_id="t-2")
    assert world.emitted(other)[-1] == "OK"
    settle(world)


def test_a_shards_own_silence_is_not_the_senders() -> None:
    """It is reported after kv_progress, however long that is."""
    world, call = sending(no_progress_s=5)
    wait(world, 19)
    assert world.taken(act.SenderStuck) == []
    wait(world, 2)
    assert world.fault(call).reason is Reason.SENDER_STUCK
    settle(world)


def is_ready(p: PrefillServer) -> bool:
    return p.control.ready


async def test_a_blocked_bulk_loop_turns_readiness_off_and_its_end_turns_it_on() -> None:
    async with running() as cluster:
        p = await cluster.prefill(no_progress_s=0.4, kv_progress_s=0.2)
        d = await cluster.decode(kv_progress_s=0.2)
        gate = threading.Event()
        p.bulk._post(lambda: gate.wait(120))
        try:
            outcome = await asyncio.wait_for(cluster.run_prefill(p, request_to(d)), LIMIT_S)
            assert isinstance(outcome.fault, Fault)
            assert outcome.fault.reason is Reason.SENDER_STUCK
            assert not is_ready(p)
        finally:
            gate.set()
        await until(lambda: p.machine.stuck is None)
        assert is_ready(p)
        request = request_to(d, random_seed=2)
        _, generate = await cluster.run(p, d, request)
        assert generate.tokens == answer_to(request)
