"""A D that is another process than was meant, says what P does not know, or lies."""

from __future__ import annotations

import pytest

from pd_grpc.prefill.decode_faults import end_state_fault
from pd_grpc.prefill.events import TransferBroken
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault, not_meant
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2, types_pb2
from tests.prefill.test_sender import compute, opened, sender
from tests.prefill.world import D1, World

UNKNOWN_STATE = 77


def test_a_prefill_that_means_another_process_of_d_is_refused(world: World) -> None:
    """S14."""
    ref = types_pb2.TransferRef(transfer_id="t-1", attempt=1, decode_epoch=5)
    call = world.call(ref=ref)
    world.connect()
    fault = world.fault(call)
    assert fault.reason is Reason.STALE_EPOCH
    assert fault.metadata == {"meant": "5", "here": "100"}


def test_a_prefill_that_means_this_process_of_d_is_placed(world: World) -> None:
    ref = types_pb2.TransferRef(transfer_id="t-1", attempt=1, decode_epoch=100)
    world.call(ref=ref)
    world.connect()
    assert world.state() is PrefillState.ALLOCATING


def test_an_end_state_that_p_does_not_know_ends_the_transfer_all_the_same(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    ref = types_pb2.TransferRef(transfer_id="t-1", attempt=1, decode_epoch=100)
    ended = decode_pb2.TransferEnded(ref=ref)
    ended.MergeFromString(b"\x18" + bytes([UNKNOWN_STATE]))
    world.say(D1, transfer_ended=ended)
    assert world.fault(call).reason is Reason.RELEASED
    assert end_state_fault(ended.state).metadata == {"state": "state 77"}


@pytest.mark.parametrize("state", [types_pb2.TRANSFER_STATE_UNSPECIFIED, UNKNOWN_STATE])
def test_a_first_token_answered_with_no_state_of_a_live_transfer_is_no_hand_off(
    world: World, state: types_pb2.TransferState
) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token(state)
    assert world.fault(call).reason is Reason.WRONG_STATE
    assert world.releases() == [(D1, Reason.WRONG_STATE)]


def test_a_d_silent_under_the_first_token_is_lost_and_the_request_has_time_left(
    world: World,
) -> None:
    """F47: the time of the call is over, not that of the request."""
    call = world.bring_to(PrefillState.SENDING)
    silence = TransportFault(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
    while PrefillState.SENDING is world.state():
        world.answer_first_token(fault=silence)
        world.advance(0.3)
    assert world.fault(call).reason is Reason.DECODE_LOST


def test_a_stream_refused_for_a_session_that_was_replaced_is_opened_again(world: World) -> None:
    world.bring_to(PrefillState.SENDING)
    replaced = Fault(Reason.NO_SESSION, "the session was replaced")
    world.feed(TransferBroken(TransferKey("t-1", 1), 0, replaced))
    assert world.state() is PrefillState.SENDING


def test_a_stream_that_meets_the_successor_of_its_decode_has_lost_it(world: World) -> None:
    """S14: what is stale is D's epoch, and P's caller must not take it for P's."""
    call = world.bring_to(PrefillState.SENDING)
    stale = not_meant(Reason.STALE_EPOCH, "another process", 7, 8)
    world.feed(TransferBroken(TransferKey("t-1", 1), 0, stale))
    assert world.fault(call).reason is Reason.DECODE_LOST


def test_a_target_that_is_no_decode_instance_is_said_so(world: World) -> None:
    call = world.call()
    world.break_session(fault=TransportFault(Code.UNIMPLEMENTED, "Method not found!"))
    fault = world.fault(call)
    assert fault.reason is Reason.WRONG_INSTANCE
    assert fault.metadata == {"meant": D1, "here": ""}


def test_a_shard_that_has_everything_before_everything_was_sent_is_not_believed() -> None:
    made = opened(sender())
    assert not made.completed()
    made.advance(0, 0, 16)
    made.advance(0, 1, 16)
    while made.next_slab(0) is not None:
        pass
    assert made.end(0) is not None
    assert made.completed()


def test_more_accepted_than_was_sent_widens_no_window() -> None:
    made = opened(sender(chunk_blocks=1), window_blocks=1)
    compute(made, 16)
    assert made.next_slab(0) is not None
    made.acked([], 2**64 - 1, 0)
    assert made.unacked_bytes == 0
    assert [made.next_slab(0), made.next_slab(0)][1] is None, "one at a time, as before"
