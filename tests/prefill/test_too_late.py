"""P under a load that it cannot carry: what it does not compute any more."""

from __future__ import annotations

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.serving_times import FEWEST
from pd_grpc.v1 import decode_pb2
from tests.prefill.world import D1, World, settle

NEEDED_S = 2.0
"""What P has needed for each of those before, from its first step to the hand-off."""


def serve(world: World, count: int = FEWEST) -> None:
    """Requests of one chunk, one after another."""
    for n in range(count):
        name = f"served-{n}"
        call = world.call(name)
        if n == 0:
            world.connect()
        world.grant(name)
        world.step()
        world.advance(NEEDED_S)
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
        world.answer_first_token(transfer_id=name)
        world.complete(name)
        assert world.emitted(call)[-1] == "OK"


def wait_for_engine(world: World, budget_s: float, waits_s: float) -> int:
    """A granted request waits until one before it has been computed."""
    first = world.call("before")
    world.grant("before")
    call = world.call("late", budget_s=budget_s)
    world.grant("late")
    assert world.state("late") is PrefillState.PREPARED
    until = world.now + waits_s
    while world.now < until:
        world.advance(min(1.0, until - world.now))
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
    world.step()
    assert world.emitted(first)[-1] == "progress"
    return call


def test_one_with_too_little_left_is_not_computed(world: World) -> None:
    serve(world)
    call = wait_for_engine(world, budget_s=10.0, waits_s=8.5)
    fault = world.fault(call)
    assert (fault.reason, fault.metadata["stage"]) == (Reason.STAGE_DEADLINE, "queue")
    assert "1.5 s are left, and 2 s are needed" in fault.message
    assert world.releases()[-1] == (D1, Reason.STAGE_DEADLINE)
    assert all(key.transfer_id != "late" for run in world.taken(act.RunStep) for key in run.keys)


def test_what_d_needs_afterwards_counts(world: World) -> None:
    serve(world)
    world.say(load=decode_pb2.Load(decoding=duration(1.5)))
    call = wait_for_engine(world, budget_s=10.0, waits_s=7.0)
    assert "3 s are left, and 3.5 s are needed" in world.fault(call).message


@pytest.mark.parametrize(
    ("budget_s", "waits_s"),
    [
        pytest.param(10.0, 7.9, id="enough is left"),
        pytest.param(3.0, 1.4, id="less than half of its time is over"),
    ],
)
def test_others_are_computed(world: World, budget_s: float, waits_s: float) -> None:
    serve(world)
    wait_for_engine(world, budget_s, waits_s)
    assert world.state("late") is PrefillState.COMPUTING


def test_a_shorter_prompt_needs_less(world: World) -> None:
    serve(world)
    world.call("before")
    world.grant("before")
    world.call("short", tokens=3, budget_s=10.0)
    world.grant("short")
    for _ in range(17):
        world.advance(0.5)
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
    world.step()
    assert world.state("short") is PrefillState.COMPUTING


def test_it_can_be_turned_off() -> None:
    world = World(serving_quantile=0.0)
    serve(world)
    wait_for_engine(world, budget_s=10.0, waits_s=8.5)
    assert world.state("late") is PrefillState.COMPUTING
    settle(world)
