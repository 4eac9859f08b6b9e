"""How transfers end: time, clients that leave, KV that cannot be used, drain, operators."""

from __future__ import annotations

import pytest

from pd_grpc.blocks.pool import BlockState
from pd_grpc.decode import events as ev
from pd_grpc.decode.states import ENDS, STAGES, TRANSITIONS
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.faults import Code, Fault, Reason, read_status
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import types_pb2
from tests.decode.harness import Harness
from tests.decode.messages import Request
from tests.decode.prefill_peer import Prefill

BEFORE_HAND_OFF = [S.EXPECTED, S.WAITING, S.RESERVED, S.RECEIVING, S.READY]
LARGE = list(range(100, 148))


def brought(d: Harness, p: Prefill, request: Request, state: S) -> str:
    """A request in a state before hand-off; in WAITING a blocker holds what it waits for."""
    if state is S.WAITING:
        p.granted(Request("t-blocker", prompt=LARGE))
    return d.bring(p, request, state)


def unblocked(p: Prefill, state: S) -> None:
    if state is S.WAITING:
        p.release(Request("t-blocker"))


# The table


def test_the_table_has_a_way_to_every_state_and_none_from_an_end() -> None:
    assert set(TRANSITIONS) == set(S)
    reached = {S.EXPECTED}
    while more := {after for s in reached for after in TRANSITIONS[s]} - reached:
        reached |= more
    assert reached == set(S)
    assert all(not TRANSITIONS[end] for end in ENDS)
    assert all(TRANSITIONS[s] >= ENDS for s in set(S) - ENDS)
    assert set(STAGES) == set(S) - ENDS
    assert {s.wire for s in S} == set(range(1, 12))


# Time


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        (S.EXPECTED, "prefill"),
        (S.WAITING, "allocate"),
        (S.RESERVED, "transfer"),
        (S.RECEIVING, "transfer"),
        (S.READY, "first_token"),
    ],
)
def test_the_budget_ends_a_request_and_names_the_stage(
    d: Harness, p: Prefill, state: S, stage: str
) -> None:
    """F18, F46: nothing outlives its budget before hand-off."""
    request = Request(prompt=LARGE)
    client = d.generate(request, budget_s=7.0)
    brought(d, p, request, state)
    d.advance(6.9)
    assert client not in d.refused
    p.heartbeat()
    d.advance(0.2)
    assert d.reason(client) is Reason.STAGE_DEADLINE
    assert d.refused[client].metadata == {"stage": stage}
    assert d.refused[client].code is Code.DEADLINE_EXCEEDED
    unblocked(p, state)


def test_the_shorter_of_two_budgets_counts_before_hand_off(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request, budget_s=50.0)
    p.granted(request, budget_s=3.0)
    d.advance(3.0)
    assert d.reason(client) is Reason.STAGE_DEADLINE


def test_after_hand_off_the_clients_time_alone_counts(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request, budget_s=9.0)
    grant = p.granted(request, budget_s=3.0)
    d.receive(grant, request.tokens)
    p.first_token(request, grant)
    d.advance(8.9)
    assert client not in d.refused
    d.advance(0.1)
    assert d.refused[client].metadata == {"stage": "decode"}
    assert d.shown[client] == request.answer[:1]
    d.run()


def test_kv_without_a_first_token_is_not_waited_for_for_ever(d: Harness, p: Prefill) -> None:
    """S10."""
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    d.receive(grant, request.tokens)
    waited = 0.0
    while client not in d.refused:
        p.heartbeat(grant)
        d.advance(2.5)
        waited += 2.5
    assert waited == d.config.first_token_s
    assert d.refused[client].metadata == {"stage": "first_token"}


def test_a_first_token_just_before_disarms_the_timer(d: Harness, p: Prefill) -> None:
    """S11."""
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    d.receive(grant, request.tokens)
    for _ in range(6):
        d.advance(d.config.first_token_s / 6 - 0.01)
        p.heartbeat(grant)
    p.first_token(request, grant)
    d.advance(1.0)
    d.run()
    assert d.shown[client] == request.answer


@pytest.mark.parametrize("with_first_token", [True, False])
def test_a_client_that_never_comes_is_not_waited_for_for_ever(
    d: Harness, p: Prefill, with_first_token: bool
) -> None:
    request = Request()
    grant = p.granted(request)
    d.receive(grant, request.tokens)
    if with_first_token:
        p.first_token(request, grant)
    d.advance(d.config.attach_s / 2)
    p.heartbeat(grant)
    assert d.state() is S.READY
    d.advance(d.config.attach_s / 2)
    assert d.path()[-1] is S.FAILED
    told = d.ended_for(p.stream)
    assert len(told) == (0 if with_first_token else 1)
    late = d.generate(request)
    assert d.reason(late) is Reason.CLIENT_ABSENT
    assert d.refused[late].code is Code.DEADLINE_EXCEEDED


def test_a_ready_request_without_a_client_says_what_it_waits_for(d: Harness, p: Prefill) -> None:
    request = Request()
    grant = p.granted(request, budget_s=2.0)
    d.receive(grant, request.tokens)
    p.first_token(request, grant)
    d.advance(2.0)
    late = d.generate(request)
    assert d.refused[late].metadata == {"stage": "attach"}


# Clients that leave


@pytest.mark.parametrize("state", BEFORE_HAND_OFF)
def test_a_client_that_leaves_before_hand_off_ends_it_for_the_prefill_too(
    d: Harness, p: Prefill, state: S
) -> None:
    """F24, F33, F61."""
    request = Request(prompt=LARGE)
    client = d.generate(request)
    brought(d, p, request, state)
    calls = [c for c in d.machine.ledger.calls if c != client]
    d.leave(client)
    assert client not in d.refused
    told = d.ended_for(p.stream)
    if state is S.EXPECTED:
        assert told == []
    elif state is S.WAITING:
        assert [d.reason(call) for call in calls] == [Reason.CLIENT_GONE]
        assert told == [], "the call's own answer says so already"
    else:
        (ended,) = told
        fault = read_status(ended.status)
        assert isinstance(fault, Fault) and fault.reason is Reason.CLIENT_GONE
        assert ended.state == types_pb2.TRANSFER_STATE_RELEASED
    assert d.reason(p.allocate(request)) is Reason.RELEASED, "it leaves a tombstone"
    unblocked(p, state)


def test_a_client_that_leaves_while_decoding_frees_here_alone(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    p.hand_off(request)
    d.run_step()
    d.leave(client)
    assert d.ended_for(p.stream) == []
    assert d.pool.free == d.pool.total - 2, "the engine is still at it"
    assert d.pool.counts()[BlockState.QUARANTINED] == 1, "of a block that is kept it only reads"
    d.run_step()


def test_a_client_that_leaves_after_the_end_is_nothing(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    p.hand_off(request)
    d.run()
    d.leave(client)
    assert d.path()[-1] is S.FINISHED


# KV that cannot be used


def test_kv_that_cannot_be_used_fails_both_sides(d: Harness, p: Prefill) -> None:
    """F15: no token after a failed receive."""
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    p.first_token(request, grant)
    d.feed(ev.ReceiveStarted(grant))
    d.feed(ev.ReceiveFailed(grant, Fault(Reason.KV_CORRUPT, "checksum differs")))
    assert d.reason(client) is Reason.KV_CORRUPT
    assert d.refused[client].code is Code.UNAVAILABLE
    (ended,) = d.ended_for(p.stream)
    assert ended.status.code == Code.DATA_LOSS
    assert d.shown[client] == request.answer[:1]
    assert d.step is None


def test_late_news_of_the_receiver_is_counted_and_changes_nothing(d: Harness, p: Prefill) -> None:
    """F3, F39."""
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    d.receive(grant, request.tokens)
    d.feed(ev.ReceiveCompleted(grant))
    d.feed(ev.ReceiveFailed(grant, Fault(Reason.KV_CORRUPT, "late")))
    assert d.late == 2
    p.first_token(request, grant)
    d.run()
    assert d.shown[client] == request.answer
    d.feed(ev.ReceiveStarted(grant))
    d.feed(ev.ReceiveProgress(grant, 1))
    d.feed(ev.ReceiveCompleted(grant))
    d.feed(ev.ReceiveFailed(grant, Fault(Reason.KV_CORRUPT, "late")))
    assert d.late == 6
    assert d.path()[-1] is S.FINISHED


# Blocks that something may still write to


def test_blocks_come_back_only_when_the_receiver_has_stopped(d: Harness, p: Prefill) -> None:
    """F2."""
    d.holds_closes = True
    request = Request(prompt=LARGE)
    p.granted(request)
    p.release(request)
    assert d.pool.counts()[BlockState.QUARANTINED] == 13
    waiting = p.allocate(Request("t-2", prompt=LARGE))
    assert waiting not in d.answers
    d.close_receivers()
    assert waiting in d.answers
    p.release(Request("t-2"))
    d.close_receivers()


def test_blocks_whose_kv_is_complete_come_back_at_once(d: Harness, p: Prefill) -> None:
    d.holds_closes = True
    request = Request()
    grant = p.granted(request)
    d.receive(grant, request.tokens)
    p.release(request)
    assert d.pool.free == d.pool.total
    d.close_receivers()


def test_blocks_come_back_only_when_the_step_has_returned(d: Harness, p: Prefill) -> None:
    request = Request(prompt=LARGE)
    client = d.generate(request)
    p.hand_off(request)
    d.leave(client)
    waiting = p.allocate(Request("t-2", prompt=LARGE))
    assert waiting not in d.answers
    d.run_step()
    assert waiting in d.answers
    p.release(Request("t-2"))


# Drain


def test_a_draining_decode_takes_nothing_new_and_finishes_the_rest(d: Harness, p: Prefill) -> None:
    running, waiting = Request("t-1", prompt=LARGE), Request("t-2", prompt=LARGE)
    client = d.generate(running)
    grant = p.granted(running)
    queued = p.allocate(waiting)
    d.feed(ev.DrainRequested(30.0))
    assert d.told[p.stream][-1].drain.deadline == duration(30)
    refused = [queued, p.allocate(Request("t-4"))]
    refused += [d.generate(Request("t-5")), d.generate(Request(), local=True)]
    for call in refused:
        assert d.reason(call) is Reason.DRAINING
        assert d.refused[call].code is Code.UNAVAILABLE
    again = p.allocate(running)
    assert d.answers[again].grant_id == grant, "a replay is nothing new"
    stranger = Prefill(d, "p-new")
    fault = d.session_ends[stranger.stream]
    assert fault is not None and fault.reason is Reason.DRAINING
    p.breaks()
    p.join()
    assert p.stream not in d.session_ends, "who has something here may come back for it"
    d.receive(grant, running.tokens)
    p.first_token(running, grant)
    assert d.drains == 0
    d.run()
    assert d.shown[client] == running.answer
    assert d.drains == 1


def test_clients_that_no_grant_will_come_for_need_not_wait_for_the_drain(
    d: Harness, p: Prefill
) -> None:
    running, waiting = Request("t-1", prompt=LARGE), Request("t-2", prompt=LARGE)
    expected = Request("t-3")
    grant = p.granted(running)
    queued = p.allocate(waiting)
    legs = [d.generate(request) for request in (waiting, expected)]
    d.feed(ev.DrainRequested(30.0))
    for call in (queued, *legs):
        assert d.reason(call) is Reason.DRAINING
    for request in (waiting, expected):
        assert d.reason(p.allocate(request)) is Reason.DRAINING, "nothing is remembered of it"
        assert d.reason(d.generate(request)) is Reason.DRAINING
    assert not d.ended_for(p.stream)
    client = d.generate(running)
    d.receive(grant, running.tokens)
    p.first_token(running, grant)
    d.run()
    assert d.shown[client] == running.answer, "what has a grant goes on"
    assert d.drains == 1


def test_a_drain_ends_by_its_deadline(d: Harness, p: Prefill) -> None:
    client = d.generate(Request())
    p.granted(Request())
    d.feed(ev.DrainRequested(30.0))
    d.feed(ev.DrainRequested(3.0))
    d.advance(2.9)
    assert d.drains == 0
    d.advance(0.1)
    assert d.drains == 1
    assert d.reason(client) is Reason.DRAINING
    assert "before the request has ended" in d.refused[client].message
    (ended,) = d.ended_for(p.stream)
    assert ended.status.code == Code.UNAVAILABLE


def test_a_step_that_hangs_is_not_waited_for_when_the_drain_is_over(d: Harness) -> None:
    client = d.generate(Request(), local=True)
    d.feed(ev.DrainRequested(3.0))
    d.advance(3.0)
    assert d.reason(client) is Reason.DRAINING
    assert d.drains == 1
    assert d.step is not None
    d.run()
    d.all_returned()
    assert d.drains == 1


def test_an_idle_decode_drains_at_once_and_only_once(d: Harness) -> None:
    d.feed(ev.DrainRequested(30.0))
    d.feed(ev.DrainRequested(10.0))
    d.advance(60.0)
    assert d.drains == 1


def test_a_decode_that_leaves_ends_everything_and_says_goodbye(d: Harness, p: Prefill) -> None:
    """S15."""
    decoding, reserved = Request("t-1"), Request("t-2")
    clients = [d.generate(r) for r in (decoding, reserved)]
    p.hand_off(decoding)
    p.granted(reserved)
    d.feed(ev.Leaving())
    assert {d.reason(c) for c in clients} == {Reason.DRAINING}
    assert d.told[p.stream][-1].goodbye.reason
    assert d.session_ends[p.stream] is None
    assert d.reason(p.allocate(Request("t-3"))) is Reason.NO_SESSION
    d.run()
    assert d.drains == 1


# Operators


@pytest.mark.parametrize("attempt", [0, 2])
def test_an_operator_may_end_a_transfer(d: Harness, p: Prefill, attempt: int) -> None:
    request = Request(attempt=2)
    client = d.generate(request)
    p.granted(request)
    d.feed(ev.OperatorReleased("t-1", attempt, "maintenance"))
    assert d.reason(client) is Reason.RELEASED
    assert "maintenance" in d.refused[client].message
    (ended,) = d.ended_for(p.stream)
    assert ended.status.code == Code.ABORTED
    d.feed(ev.OperatorReleased("t-1", attempt, "again"))
    assert d.late == 1
