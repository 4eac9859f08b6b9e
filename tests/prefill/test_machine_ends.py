"""What ends a request, in every state it can be in; and what comes after the end."""

from __future__ import annotations

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2, types_pb2
from tests.prefill.world import D1, GONE, IN_FLIGHT, World

T1 = TransferKey("t-1", 1)
GRANTED = [PrefillState.PREPARED, PrefillState.COMPUTING, PrefillState.SENDING]


def _told(state: PrefillState) -> bool:
    """Whether D knows of a request in this state."""
    return state is not PrefillState.QUEUED


@pytest.mark.parametrize("state", IN_FLIGHT)
def test_a_caller_that_leaves_ends_the_request(world: World, state: PrefillState) -> None:
    call = world.bring_to(state)
    world.feed(ev.PrefillCallEnded(call))
    assert world.state() is PrefillState.CANCELLED
    assert world.releases() == ([(D1, Reason.CLIENT_GONE)] if _told(state) else [])
    assert len(world.taken(act.CancelAllocate)) == (state is PrefillState.ALLOCATING)
    world.feed(ev.PrefillCallEnded(call))
    assert world.machine.requests.ended_by_state[PrefillState.CANCELLED] == 1


STAGES = {
    PrefillState.ALLOCATING: "allocate",
    PrefillState.PREPARED: "queue",
    PrefillState.COMPUTING: "compute",
    PrefillState.SENDING: "first_token",
}


@pytest.mark.parametrize("state", STAGES)
def test_a_budget_that_is_over_ends_the_request_and_names_the_stage(
    world: World, state: PrefillState
) -> None:
    call = world.bring_to(state, budget_s=3.0)
    world.advance(3.0)
    fault = world.fault(call)
    assert (fault.reason, fault.metadata["stage"]) == (Reason.STAGE_DEADLINE, STAGES[state])
    assert world.releases() == [(D1, Reason.STAGE_DEADLINE)]


def test_a_budget_that_is_over_before_d_could_be_asked_is_spent_in_the_queue(world: World) -> None:
    call = world.call(budget_s=1.0)
    world.advance(1.0)
    fault = world.fault(call)
    assert (fault.reason, fault.metadata["stage"]) == (Reason.STAGE_DEADLINE, "queue")
    assert world.releases() == []


@pytest.mark.parametrize("state", [s for s in IN_FLIGHT if s is not PrefillState.QUEUED])
def test_an_end_that_d_tells_ends_the_request_without_a_release(
    world: World, state: PrefillState
) -> None:
    call = world.bring_to(state)
    gone = Fault(Reason.CLIENT_GONE, "the client left")
    ended = decode_pb2.TransferEnded(
        ref=types_pb2.TransferRef(transfer_id="t-1", attempt=1, decode_epoch=100),
        status=gone.status(),
        state=types_pb2.TRANSFER_STATE_RELEASED,
    )
    world.say(transfer_ended=ended)
    assert world.fault(call).reason is Reason.CLIENT_GONE
    assert world.releases() == []
    world.say(transfer_ended=ended)
    assert world.machine.requests.late_events == 1


@pytest.mark.parametrize("state", GRANTED)
def test_a_d_that_does_not_come_back_within_grace_is_lost(
    world: World, state: PrefillState
) -> None:
    call = world.bring_to(state)
    world.break_session()
    world.advance(0.9)
    assert not world.state().terminal
    world.advance(0.2)
    assert world.fault(call).reason is Reason.DECODE_LOST


@pytest.mark.parametrize("state", GRANTED)
def test_a_session_that_comes_back_carries_its_grants_on(world: World, state: PrefillState) -> None:
    world.bring_to(state)
    world.break_session()
    world.advance(0.1)
    world.connect()
    beats = [a.message.heartbeat for a in world.taken(act.SendOnSession)]
    assert list(beats[-1].grant_ids) == ["g-t-1-1"]
    world.advance(1.5)
    assert world.state() is state


@pytest.mark.parametrize("state", GRANTED)
def test_a_d_that_was_restarted_has_lost_its_transfers(world: World, state: PrefillState) -> None:
    call = world.bring_to(state)
    world.break_session()
    world.advance(0.1)
    world.decodes[D1].epoch = 101
    world.connect()
    assert world.fault(call).reason is Reason.DECODE_LOST
    assert world.releases() == []


@pytest.mark.parametrize("state", IN_FLIGHT)
def test_an_operator_releases_a_request(world: World, state: PrefillState) -> None:
    call = world.bring_to(state)
    world.feed(ev.OperatorRelease("t-1", 0, "it was in the way"))
    fault = world.fault(call)
    assert fault.reason is Reason.RELEASED and "it was in the way" in fault.message
    assert world.releases() == ([(D1, Reason.RELEASED)] if _told(state) else [])


@pytest.mark.parametrize("state", IN_FLIGHT)
def test_a_newer_attempt_takes_the_place_of_an_older(world: World, state: PrefillState) -> None:
    old = world.bring_to(state)
    world.call(attempt=2)
    assert world.fault(old).reason is Reason.SUPERSEDED
    assert world.releases() == ([(D1, Reason.SUPERSEDED)] if _told(state) else [])
    assert world.state(attempt=2) in (PrefillState.QUEUED, PrefillState.ALLOCATING)


@pytest.mark.parametrize("state", GRANTED)
def test_an_unknown_grant_ends_its_transfer_at_once(world: World, state: PrefillState) -> None:
    call = world.bring_to(state)
    if state is PrefillState.SENDING:
        # Here the first token's answer says what has become of it.
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck(unknown_grant_ids=["g-t-1-1"]))
        assert not world.state().terminal
        world.answer_first_token()
    world.say(heartbeat_ack=decode_pb2.HeartbeatAck(unknown_grant_ids=["g-t-1-1", "g-other"]))
    assert world.fault(call).reason is Reason.LEASE_EXPIRED


# --- late and repeated ---------------------------------------------------------------------------


def test_a_grant_that_comes_after_the_cancel_is_given_back(world: World) -> None:
    call = world.bring_to(PrefillState.ALLOCATING)
    asked = world.ask()
    world.feed(ev.PrefillCallEnded(call))
    world.answer_release()
    world.grant(asked=asked)
    assert world.releases() == [(D1, Reason.CLIENT_GONE), (D1, Reason.RELEASED)]
    assert world.state() is PrefillState.CANCELLED
    assert world.machine.requests.late_events == 1


def test_events_after_the_end_change_nothing_and_are_counted(world: World) -> None:
    world.bring_to(PrefillState.SENDING)
    world.answer_first_token()
    world.complete()
    before = len(world.actions)
    world.complete()
    world.answer_first_token()
    world.feed(ev.TransferClosed(T1, 0), ev.TransferBroken(T1, 0, GONE))
    world.feed(ev.StepDone(99, []), ev.StepFailed(99, "late"))
    assert len(world.actions) == before
    assert world.machine.requests.late_events == 7
    assert world.state() is PrefillState.HANDED_OFF


def test_the_key_of_a_request_that_has_ended_is_not_used_again(world: World) -> None:
    world.bring_to(PrefillState.SENDING)
    world.answer_first_token()
    world.complete()
    assert world.fault(world.call()).reason is Reason.RELEASED
    world.advance(61)
    assert world.machine.transfer("t-1", 1, world.now) is None


def test_the_same_key_twice_at_once_is_refused_and_the_first_unharmed(world: World) -> None:
    first = world.bring_to(PrefillState.SENDING)
    assert world.fault(world.call()).reason is Reason.DUPLICATE_TRANSFER
    world.answer_first_token()
    world.complete()
    assert world.emitted(first)[-1] == "OK"


def test_an_older_attempt_is_refused(world: World) -> None:
    world.call(attempt=2)
    fault = world.fault(world.call(attempt=1))
    assert fault.reason is Reason.STALE_ATTEMPT
    assert (fault.metadata["attempt"], fault.metadata["newest"]) == ("1", "2")
