"""A request's way through P, by lists of events."""

from __future__ import annotations

import pytest

from pd_grpc.blocks.pool import BlockState
from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.messages import prompt_digest, seconds
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2, sampling_pb2, types_pb2
from tests.prefill.world import D1, D2, EOS, GONE, IN_FLIGHT, World, settle

T1 = TransferKey("t-1", 1)
GRANTED = [PrefillState.PREPARED, PrefillState.COMPUTING, PrefillState.SENDING]


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
    assert world.pool.counts()[BlockState.FREE] == world.pool.total


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


# --- cancel, budget, TransferEnded, session loss and operator, in every state -------------------


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
    PrefillState.ALLOCATING: "prepare",
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


# --- the engine ----------------------------------------------------------------------------------


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


def test_a_cancelled_request_keeps_its_blocks_until_the_step_is_over(world: World) -> None:
    call = world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.PrefillCallEnded(call))
    for close in world.take(act.CloseTransfer):
        world.feed(ev.TransferClosed(close.key, close.shard))
    assert world.pool.counts()[BlockState.QUARANTINED] == 3
    world.step()
    assert world.pool.counts()[BlockState.FREE] == world.pool.total
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


# --- the first token -----------------------------------------------------------------------------


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


def test_a_first_token_lost_on_the_way_is_sent_once_more(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token(fault=GONE)
    assert [sent.attempt for sent in world.taken(act.SendFirstToken)] == [1, 2]
    world.answer_first_token()
    world.complete()
    assert world.emitted(call)[-1] == "OK"


def test_a_first_token_lost_twice_is_a_lost_d(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token(fault=GONE)
    world.answer_first_token(fault=GONE)
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


def test_a_stream_that_keeps_breaking_fails_after_kv_progress(world: World) -> None:
    call = world.bring_to(PrefillState.SENDING)
    world.answer_first_token()
    for _ in range(20):
        if world.state().terminal:
            break
        world.feed(ev.TransferBroken(T1, 0, GONE))
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
        world.advance(1.0)
    fault = world.fault(call)
    assert (fault.reason, fault.metadata["stage"]) == (Reason.STAGE_DEADLINE, "transfer")
    assert world.releases() == [(D1, Reason.STAGE_DEADLINE)]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Fault(Reason.KV_CORRUPT, "crc"), Reason.KV_CORRUPT),
        (Fault(Reason.LEASE_EXPIRED, "over"), Reason.LEASE_EXPIRED),
        (Fault(Reason.BAD_REQUEST, "block 9 of 3"), Reason.WRONG_STATE),
        (Fault(Reason.STAGE_DEADLINE, "no ack", {"stage": "transfer"}), Reason.STAGE_DEADLINE),
        (TransportFault(Code.DEADLINE_EXCEEDED, "late"), Reason.STAGE_DEADLINE),
    ],
)
def test_a_final_word_on_the_stream_fails_the_request(
    world: World, said: Fault | TransportFault, reason: Reason
) -> None:
    call = world.bring_to(PrefillState.COMPUTING)
    world.feed(ev.TransferBroken(T1, 0, said))
    assert world.fault(call).reason is reason
    assert world.releases() == [(D1, reason)]


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


def test_what_is_not_finished_when_the_drain_is_over_fails(world: World) -> None:
    call = world.bring_to(PrefillState.ALLOCATING)
    world.feed(ev.DrainRequested(2))
    world.advance(2)
    assert world.fault(call).reason is Reason.DRAINING
    assert world.releases() == [(D1, Reason.DRAINING)]
    assert len(world.taken(act.Drained)) == 1


def test_a_p_whose_newer_process_exists_drains(world: World) -> None:
    call = world.bring_to(PrefillState.QUEUED, decodes=(D1, D2))
    world.break_session(fault=Fault(Reason.STALE_EPOCH, "a newer p exists"))
    assert world.emitted(call)[:2] == ["queued", "placing"]
    assert len(world.taken(act.Superseded)) == 1
    assert world.fault(world.call("t-2")).reason is Reason.DRAINING
