"""A request's way through P, by lists of events."""

from __future__ import annotations

import pytest

from pd_grpc.blocks.pool import BlockState
from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import prompt_digest, seconds
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import sampling_pb2, types_pb2
from tests.prefill.world import D1, D2, EOS, World

T1 = TransferKey("t-1", 1)


def test_a_request_is_handed_off_once_d_has_the_kv_and_the_first_token(world: World) -> None:
    call = world.call(tokens=12)
    world.connect()
    world.grant()
    world.step()
    world.step(token=9)
    world.answer_first_token()
    assert world.state() is PrefillState.SENDING
    world.advance(0.5)
    world.complete()
    assert world.state() is PrefillState.HANDED_OFF
    assert world.emitted(call) == ["queued", "progress", "progress", "handed_off", "OK"]
    handed_off = world.taken(act.Emit)[-1].response.handed_off
    assert handed_off.decode.name == "d1"
    assert (handed_off.usage.prompt_tokens, handed_off.usage.completion_tokens) == (12, 1)
    assert seconds(handed_off.timings.exposed_send) == pytest.approx(0.5)
    assert world.releases() == []


def test_the_first_token_may_be_answered_after_the_last_kv_acknowledgement(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.complete()
    assert world.state() is PrefillState.SENDING
    world.answer_first_token()
    assert world.emitted(call)[-2:] == ["handed_off", "OK"]


def test_d_is_asked_for_what_the_request_needs(world: World) -> None:
    world.call(tokens=6, generated=(7, 8), max_tokens=10, budget_s=40)
    world.connect()
    asked = world.ask()
    request = asked.request
    assert request.session_id == "d1-s1"
    assert request.ref == types_pb2.TransferRef(transfer_id="t-1", attempt=1, decode_epoch=100)
    assert (request.prompt_tokens, request.max_new_tokens) == (8, 8)
    assert request.prompt_digest == prompt_digest([3, 4, 5, 6, 7, 8, 7, 8])
    assert seconds(request.max_wait) == seconds(request.budget) == 40
    assert asked.timeout_s == 42
    assert request.kv_needed


def test_a_prompt_is_cut_at_multiples_of_the_chunk(world: World) -> None:
    world.call(tokens=20)
    world.connect()
    world.grant()
    cuts = [world.step().chunks[0] for _ in range(3)]
    assert [(c.start, len(c.token_ids)) for c in cuts] == [(0, 8), (8, 8), (16, 4)]
    assert [c.sample is None for c in cuts] == [True, True, False]
    assert cuts[2].sample is not None and cuts[2].sample.position == 20


def test_tokens_the_client_has_are_computed_and_counted_as_output(world: World) -> None:
    world.call(tokens=6, generated=(7, 8), max_tokens=3)
    world.connect()
    world.grant()
    run = world.step(token=9)
    sample = run.chunks[0].sample
    assert sample is not None and (sample.position, sample.generated) == (8, 2)
    (sent,) = world.taken(act.SendFirstToken)
    assert sent.request.tokens[0].finish_reason == types_pb2.FINISH_REASON_LENGTH
    world.answer_first_token(types_pb2.TRANSFER_STATE_FINISHED)
    usage = world.taken(act.Emit)[-1].response.handed_off.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 3)


def test_a_stream_to_the_shard_is_open_before_anything_is_computed(world: World) -> None:
    world.call()
    world.connect()
    world.grant()
    order = [type(a) for a in world.actions if isinstance(a, act.OpenTransfer | act.RunStep)]
    assert order == [act.OpenTransfer, act.RunStep]
    (opened,) = world.taken(act.OpenTransfer)
    assert opened.endpoint == f"bulk-{D1}"
    assert opened.open.grant_id == "g-t-1-1"
    assert opened.plan.wanted == ((0, 2),) and opened.plan.tokens == 6


# --- what ends at P (F27) ------------------------------------------------------------------------


def test_one_token_of_output_needs_no_kv_and_no_transfer(world: World) -> None:
    call = world.call(max_tokens=1)
    world.connect()
    assert not world.ask().request.kv_needed
    world.grant()
    world.step()
    assert world.taken(act.OpenTransfer) == []
    (sent,) = world.taken(act.SendFirstToken)
    assert sent.request.tokens[0].finish_reason == types_pb2.FINISH_REASON_LENGTH
    world.answer_first_token(types_pb2.TRANSFER_STATE_FINISHED)
    assert world.emitted(call)[-1] == "OK"


def test_a_first_token_that_ends_the_answer_ends_the_transfer(world: World) -> None:
    call = world.call()
    world.connect()
    world.grant()
    world.step(token=EOS)
    (sent,) = world.taken(act.SendFirstToken)
    assert sent.request.tokens[0].finish_reason == types_pb2.FINISH_REASON_STOP
    assert [close.key for close in world.taken(act.CloseTransfer)] == [T1]
    world.answer_first_token(types_pb2.TRANSFER_STATE_FINISHED)
    assert world.emitted(call)[-1] == "OK"
    # The bulk side may still be reading: the blocks are not anyone else's yet.
    assert world.pool.counts()[BlockState.QUARANTINED] == 2
    world.confirm_closed()
    assert world.pool.free == world.pool.total


def test_eos_is_an_ordinary_token_where_the_request_ignores_it(world: World) -> None:
    sampling = sampling_pb2.SamplingParams(ignore_eos=True)
    world.call(sampling=sampling)
    world.connect()
    world.grant()
    world.step(token=EOS)
    (sent,) = world.taken(act.SendFirstToken)
    assert sent.request.tokens[0].finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED
    assert world.taken(act.CloseTransfer) == []


def test_an_answer_d_has_finished_is_handed_off_without_its_last_acknowledgement(
    world: World,
) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token(types_pb2.TRANSFER_STATE_FINISHED)
    assert world.emitted(call)[-1] == "OK"


# --- drain ---------------------------------------------------------------------------------------


def test_a_draining_p_finishes_what_it_has_and_takes_nothing_new(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.feed(ev.DrainRequested(30))
    assert world.fault(world.call("t-2")).reason is Reason.DRAINING
    assert world.taken(act.Drained) == []
    world.answer_first_token()
    world.complete()
    assert world.emitted(call)[-1] == "OK"
    assert len(world.taken(act.Drained)) == 1


def test_a_draining_p_stays_until_a_d_that_may_be_back_has_heard_of_an_end(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.feed(ev.DrainRequested(30))
    world.break_session()
    world.feed(ev.PrefillCallEnded(call))
    assert world.taken(act.Drained) == []
    world.advance(0.05)  # the back-off
    world.connect()
    assert world.releases() == [(D1, Reason.CLIENT_GONE)]
    assert len(world.taken(act.Drained)) == 1


def test_a_draining_p_leaves_when_a_d_has_not_come_back_in_time(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.feed(ev.DrainRequested(30))
    world.break_session()
    world.feed(ev.PrefillCallEnded(call))
    world.advance(1)  # D's grace
    assert len(world.taken(act.Drained)) == 1


def test_what_is_not_finished_when_the_drain_is_over_fails(world: World) -> None:
    call = world.bring_to(PrefillState.ALLOCATING)
    world.feed(ev.DrainRequested(2))
    world.advance(2)
    assert world.fault(call).reason is Reason.DRAINING
    assert world.releases() == [(D1, Reason.DRAINING)]
    assert len(world.taken(act.Drained)) == 1


def test_of_two_drains_the_earlier_deadline_stands(world: World) -> None:
    call = world.bring_to(PrefillState.ALLOCATING)
    world.feed(ev.DrainRequested(2))
    world.feed(ev.DrainRequested(30))
    world.advance(2)
    assert world.fault(call).reason is Reason.DRAINING


def test_a_p_whose_newer_process_exists_drains(world: World) -> None:
    call = world.bring_to(PrefillState.QUEUED, decodes=(D1, D2))
    world.break_session(fault=Fault(Reason.STALE_EPOCH, "a newer p exists"))
    assert world.emitted(call)[:2] == ["queued", "placing"]
    assert len(world.taken(act.Superseded)) == 1
    assert world.fault(world.call("t-2")).reason is Reason.DRAINING
