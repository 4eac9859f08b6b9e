"""The engine's part in a request: steps that fail, hang or outlast it; P's own blocks."""

from __future__ import annotations

from pd_grpc.blocks.pool import BlockState
from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2
from tests.prefill.world import D1, World, settle


def test_an_engine_that_raises_fails_the_request_on_both_sides(world: World) -> None:
    call = world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.StepFailed(world.taken(act.RunStep)[-1].step, "no such kernel"))
    fault = world.fault(call)
    assert (fault.reason, fault.message) == (Reason.ENGINE_ERROR, "no such kernel")
    assert world.releases() == [(D1, Reason.ENGINE_ERROR)]


def test_of_a_batch_that_fails_only_the_one_at_fault_fails(world: World) -> None:
    world.occupy_pool()
    good, bad = world.call("t-1", tokens=4), world.call("t-2", tokens=4)
    world.connect()
    world.grant("t-1")
    world.grant("t-2")
    world.free_pool()
    world.advance(0)
    world.call("t-3", tokens=4)
    together = world.taken(act.RunStep)[-1]
    assert [key.transfer_id for key in together.keys] == ["t-1", "t-2"]
    world.feed(ev.StepFailed(together.step, "a token went wrong"))
    alone = world.step()
    assert [key.transfer_id for key in alone.keys] == ["t-1"]
    world.feed(ev.StepFailed(world.taken(act.RunStep)[-1].step, "a token went wrong"))
    assert world.fault(bad).reason is Reason.ENGINE_ERROR
    assert world.emitted(good)[-1] == "progress"


def test_of_a_step_only_the_one_without_a_token_fails(world: World) -> None:
    world.occupy_pool()
    good, bad = world.call("t-1", tokens=4), world.call("t-2", tokens=4)
    world.connect()
    world.grant("t-1")
    world.grant("t-2")
    world.free_pool()
    world.advance(0)
    world.call("t-3", tokens=4)
    together = world.step(tokenless=["t-2"])
    assert [key.transfer_id for key in together.keys] == ["t-1", "t-2"]
    fault = world.fault(bad)
    assert (fault.reason, fault.message) == (Reason.ENGINE_ERROR, "no token is left")
    assert world.releases() == [(D1, Reason.ENGINE_ERROR)]
    assert world.emitted(good)[-1] == "progress"
    assert world.state("t-1") is PrefillState.SENDING


def test_a_cancelled_request_keeps_its_blocks_until_the_step_is_over(world: World) -> None:
    call = world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.PrefillCallEnded(call))
    for close in world.take(act.CloseTransfer):
        world.feed(ev.TransferClosed(close.key, close.strand))
    assert world.pool.counts()[BlockState.QUARANTINED] == 3
    world.step()
    assert world.pool.free == world.pool.total
    assert len(world.taken(act.RunStep)) == 1


def test_a_stuck_engine_fails_what_needs_it_and_takes_nothing_until_it_ends(world: World) -> None:
    computing = world.bring_to(PrefillState.COMPUTING, budget_s=1000)
    world.advance(9)
    for _ in range(14):
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
        world.advance(8)
    assert world.fault(computing).reason is Reason.ENGINE_STUCK
    assert len(world.taken(act.EngineStuck)) == 1
    assert world.fault(world.call("t-2")).reason is Reason.ENGINE_STUCK
    world.step()
    assert len(world.taken(act.EngineAlive)) == 1
    world.call("t-3")
    assert world.state("t-3") is not PrefillState.FAILED


def test_a_request_waits_for_ps_own_blocks_holding_none() -> None:
    world = World(num_blocks=4)
    world.call("t-1", tokens=12)
    world.call("t-2", tokens=12)
    world.connect()
    world.grant("t-1")
    world.grant("t-2")
    assert world.state("t-1") is PrefillState.COMPUTING
    assert world.state("t-2") is PrefillState.PREPARED
    assert world.machine.requests.in_flight[TransferKey("t-2", 1)].holding is None
    world.step()
    world.step()
    world.answer_first_token(transfer_id="t-1")
    assert world.state("t-2") is PrefillState.PREPARED
    world.complete("t-1")
    assert world.state("t-2") is PrefillState.COMPUTING
    settle(world)
