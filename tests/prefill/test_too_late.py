"""P under a load that it cannot carry: what it does not compute any more."""

from __future__ import annotations

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.serving_times import FEWEST
from pd_grpc.v1 import decode_pb2
from tests.prefill.world import D1, D2, World, settle

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


def wait_for_engine(world: World, budget_s: float, waits_s: float, max_tokens: int = 16) -> int:
    """A granted request waits until one before it has been computed."""
    first = world.call("before")
    world.grant("before")
    call = world.call("late", budget_s=budget_s, max_tokens=max_tokens)
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
    world.say(load=decode_pb2.Load(decoding=duration(1.5), decoding_each=duration(1.0)))
    call = wait_for_engine(world, budget_s=10.0, waits_s=7.0)
    assert "3 s are left, and 3.5 s are needed" in world.fault(call).message


@pytest.mark.parametrize(("max_tokens", "refused"), [(1, False), (2, False), (16, True)])
def test_a_short_answer_needs_little_of_d(world: World, max_tokens: int, refused: bool) -> None:
    serve(world)
    world.say(load=decode_pb2.Load(decoding=duration(8.0), decoding_each=duration(0.25)))
    call = wait_for_engine(world, budget_s=10.0, waits_s=7.0, max_tokens=max_tokens)
    assert (world.state("late") is PrefillState.FAILED) is refused
    if refused:
        assert "6 s are needed" in world.fault(call).message


def test_a_slow_d_says_nothing_of_another(world: World) -> None:
    serve(world)
    world.call("before", decodes=(D2,))
    world.connect(D2)
    world.grant("before")
    world.call("late", decodes=(D2,), budget_s=10.0)
    world.grant("late")
    for _ in range(17):
        world.advance(0.5)
        for endpoint in (D1, D2):
            world.say(endpoint, heartbeat_ack=decode_pb2.HeartbeatAck())
    world.step()
    assert world.state("late") is PrefillState.COMPUTING


def test_those_behind_a_refused_one_may_ask_at_once() -> None:
    world = World(prepare_ahead=2)
    serve(world)
    world.call("before")
    world.grant("before")
    late = world.call("late", budget_s=10.0)
    world.grant("late")
    world.call("next")
    for _ in range(17):
        world.advance(0.5)
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
    world.occupy_pool()
    world.step()
    assert world.fault(late).reason is Reason.STAGE_DEADLINE
    assert world.state("next") is PrefillState.ALLOCATING
    settle(world)


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
