"""The first token and the KV on their way to D, and what can happen to them."""

from __future__ import annotations

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2, types_pb2
from tests.prefill.world import D1, GONE, World

T1 = TransferKey("t-1", 1)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (types_pb2.TRANSFER_STATE_RELEASED, Reason.RELEASED),
        (types_pb2.TRANSFER_STATE_FAILED, Reason.RELEASED),
        (types_pb2.TRANSFER_STATE_EXPIRED, Reason.LEASE_EXPIRED),
    ],
)
def test_a_first_token_for_a_transfer_that_d_has_ended_hands_nothing_off(
    world: World, state: types_pb2.TransferState, reason: Reason
) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token(state)
    assert world.fault(call).reason is reason


def test_a_first_token_lost_on_the_way_is_sent_again_after_the_back_off(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token(fault=GONE)
    assert [sent.attempt for sent in world.taken(act.SendFirstToken)] == [1]
    world.advance(0.06)
    assert [sent.attempt for sent in world.taken(act.SendFirstToken)] == [1, 2]
    world.answer_first_token()
    world.complete()
    assert world.emitted(call)[-1] == "OK"


def test_a_first_token_is_sent_again_until_grace_is_over(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    began = world.now
    tries: list[float] = []
    for _ in range(20):
        if world.state().terminal:
            break
        tries.append(round(world.now - began, 2))
        world.answer_first_token(fault=GONE)
        world.advance((world.machine.next_wake() or began) - world.now)
    assert tries == [0, 0.05, 0.15, 0.35, 0.6, 0.85, 1.0]
    assert world.fault(call).reason is Reason.DECODE_LOST
    assert world.releases() == [(D1, Reason.DECODE_LOST)]


def test_a_first_token_waits_for_the_session_to_come_back(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.break_session()
    world.answer_first_token(fault=GONE)
    assert len(world.taken(act.SendFirstToken)) == 1
    world.advance(0.1)
    world.connect()
    (_, again) = world.taken(act.SendFirstToken)
    assert again.request.session_id == "d1-s2"
    world.answer_first_token()
    world.complete()
    assert world.emitted(call)[-1] == "OK"


def test_a_first_token_whose_back_off_ends_in_a_broken_session_waits_for_the_next(
    world: World,
) -> None:
    world.bring_to(PrefillState.SENDING)
    world.answer_first_token(fault=GONE)
    world.break_session()
    world.advance(0.3)
    assert len(world.taken(act.SendFirstToken)) == 1
    world.connect()
    assert len(world.taken(act.SendFirstToken)) == 2
    world.advance(0.3)
    assert len(world.taken(act.SendFirstToken)) == 2


def test_a_refused_first_token_fails_the_request_with_ds_reason(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token(fault=Fault(Reason.WRONG_STATE, "not now"))
    assert world.fault(call).reason is Reason.WRONG_STATE


# --- the KV stream -------------------------------------------------------------------------------


def test_a_broken_stream_is_opened_again_after_the_back_off(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.feed(ev.TransferBroken(T1, 0, GONE))
    assert len(world.taken(act.OpenTransfer)) == 1
    world.advance(0.06)
    assert len(world.taken(act.OpenTransfer)) == 2
    world.complete()
    world.answer_first_token()
    assert world.emitted(call)[-1] == "OK"


def test_a_broken_stream_waits_for_a_broken_session(world: World) -> None:
    world.bring_to(PrefillState.SENDING)
    world.break_session()
    world.feed(ev.TransferBroken(T1, 0, GONE))
    world.advance(0.2)
    assert len(world.taken(act.OpenTransfer)) == 1
    world.connect()
    (_, again) = world.taken(act.OpenTransfer)
    assert again.open.session_id == "d1-s2"


GRACE_S, KV_PROGRESS_S = 1.0, 10.0


@pytest.mark.parametrize("why", [GONE, Fault(Reason.NO_SESSION, "superseded")])
def test_a_shard_that_is_not_reached_again_fails_after_grace(
    world: World, why: Fault | TransportFault
) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token()
    since = world.now
    while not world.state().terminal:
        assert world.now < since + 2 * GRACE_S
        world.feed(ev.TransferBroken(T1, 0, why))
        world.advance(0.1)
    assert since + GRACE_S <= world.now
    assert world.fault(call).reason is Reason.DECODE_LOST, "another D may do"
    assert world.releases() == [(D1, Reason.DECODE_LOST)]


def test_a_shard_that_is_reached_again_has_time_to_go_on(world: World) -> None:
    world.bring_to(PrefillState.SENDING)
    world.feed(ev.TransferBroken(T1, 0, GONE))
    world.advance(0.1)
    world.feed(ev.TransferReopened(T1, 0))
    world.advance(5 * GRACE_S)
    assert world.state() is PrefillState.SENDING
    world.complete()
    world.answer_first_token()
    assert world.state() is PrefillState.HANDED_OFF


def test_a_stream_that_is_opened_and_breaks_again_and_again_fails_after_kv_progress(
    world: World,
) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token()
    since = world.now
    while not world.state().terminal:
        assert world.now < since + 2 * KV_PROGRESS_S
        world.feed(ev.TransferBroken(T1, 0, GONE))
        world.advance(0.1)
        world.feed(ev.TransferReopened(T1, 0))
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
        world.advance(0.5)
    assert since + KV_PROGRESS_S <= world.now
    assert world.fault(call).reason is Reason.DECODE_LOST


def test_a_shard_that_is_owed_nothing_may_be_lost_and_reached_in_a_step_that_takes_long(
    world: World,
) -> None:
    world.bring_to(PrefillState.COMPUTING)
    for _ in range(3):
        world.feed(ev.TransferBroken(T1, 0, GONE))
        world.advance(0.1)
        world.feed(ev.TransferReopened(T1, 0))
        for _ in range(4):
            world.advance(0.4 * KV_PROGRESS_S)
            world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
        assert world.state() is PrefillState.COMPUTING, "the shard owes nothing"
    world.step()
    world.step()
    world.complete()
    world.answer_first_token()
    assert world.state() is PrefillState.HANDED_OFF


def test_a_stream_that_waits_for_a_session_is_not_given_up_before_that_is(world: World) -> None:
    world.bring_to(PrefillState.SENDING)
    world.feed(ev.TransferBroken(T1, 0, GONE))
    world.advance(0.7 * GRACE_S)
    world.break_session()
    world.advance(0.7 * GRACE_S)
    assert world.state() is PrefillState.SENDING
    world.connect()
    world.complete()
    world.answer_first_token()
    assert world.state() is PrefillState.HANDED_OFF


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Fault(Reason.KV_CORRUPT, "crc"), Reason.KV_CORRUPT),
        (Fault(Reason.LEASE_EXPIRED, "over"), Reason.LEASE_EXPIRED),
        (Fault(Reason.BAD_REQUEST, "block 9 of 3"), Reason.WRONG_STATE),
        (Fault(Reason.STAGE_DEADLINE, "no ack", {"stage": "transfer"}), Reason.STAGE_DEADLINE),
        (TransportFault(Code.DEADLINE_EXCEEDED, "silent"), Reason.DECODE_LOST),
    ],
)
def test_a_final_word_on_the_stream_fails_the_request(
    world: World, said: Fault | TransportFault, reason: Reason
) -> None:
    call = world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.TransferBroken(T1, 0, said))
    assert world.fault(call).reason is reason
    assert world.releases() == [(D1, reason)]
