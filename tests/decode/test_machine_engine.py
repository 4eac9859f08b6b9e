"""The engine's side: batches, preemption, steps that fail or hang, requests prefilled here."""

from __future__ import annotations

from typing import Any

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.engine.stopping import Finish
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import inference_pb2, types_pb2
from tests.decode.harness import Harness
from tests.decode.messages import Request, requests
from tests.decode.prefill_peer import Prefill


def small_pool(blocks: int, **settings: Any) -> tuple[Harness, Prefill]:
    d = Harness(num_blocks=blocks, **settings)
    return d, Prefill(d)


def test_requests_decode_together(d: Harness, p: Prefill) -> None:
    asked = list(requests(3))
    clients = [d.generate(r) for r in asked]
    for request in asked:
        p.hand_off(request)
    d.run_step()
    assert d.step is not None and len(d.step.decode) == 3
    d.run()
    assert [d.shown[c] for c in clients] == [r.answer for r in asked]


def test_a_batch_is_bounded_and_the_oldest_go_first() -> None:
    d, p = small_pool(16, max_batch=2)
    asked = list(requests(4))
    clients = [d.generate(r) for r in asked]
    for request in asked:
        p.hand_off(request)
        d.advance(0.01)
    d.run()
    assert max(len(plan.decode) for plan in d.steps) == 2
    assert list(d.finished) == clients
    assert [d.shown[c] for c in clients] == [r.answer for r in asked]
    d.all_returned()


# Preemption


def test_the_youngest_is_preempted_and_gives_the_same_tokens() -> None:
    """F29, S9: progress is certain, and nothing is recycled that is in use."""
    d, p = small_pool(6)
    old, young = list(requests(2, max_tokens=14))
    clients = [d.generate(r) for r in (old, young)]
    p.hand_off(old)
    d.advance(0.01)
    p.hand_off(young)
    d.run()
    assert S.PREEMPTED in d.path(young.transfer_id)
    assert S.PREEMPTED not in d.path(old.transfer_id)
    assert [d.shown[c] for c in clients] == [old.answer, young.answer]
    assert [d.finished[c].reason for c in clients] == [Finish.LENGTH] * 2
    d.all_returned()


def test_a_preempted_request_goes_ahead_of_the_queue() -> None:
    d, p = small_pool(6)
    old, young, waiting = list(requests(3, max_tokens=14))
    clients = [d.generate(r) for r in (old, young)]
    p.hand_off(old)
    d.advance(0.01)
    p.hand_off(young)
    while d.state(young.transfer_id) is not S.PREEMPTED:
        d.run_step()
    call = p.allocate(waiting)
    while d.transfer(young.transfer_id).holding is None:
        assert call not in d.answers
        d.run_step()
    d.run()
    p.release(waiting)
    d.run()
    assert call in d.answers
    assert [d.shown[c] for c in clients] == [old.answer, young.answer]
    d.all_returned()


def test_a_request_put_off_while_it_is_prefilled_again_still_gives_its_answer() -> None:
    d, p = small_pool(9, chunk_tokens=4, prefill_batch=1)
    asked = list(requests(3, max_tokens=24))
    clients = [d.generate(r) for r in asked]
    for request in asked:
        p.hand_off(request)
        d.advance(0.01)
    d.run()
    assert S.PREEMPTED not in d.path(asked[0].transfer_id), "the oldest always goes on"
    assert [d.shown[c] for c in clients] == [r.answer for r in asked]
    d.all_returned()


def test_a_client_of_a_preempted_request_may_leave() -> None:
    d, p = small_pool(6)
    old, young = list(requests(2, max_tokens=14))
    clients = [d.generate(r) for r in (old, young)]
    p.hand_off(old)
    d.advance(0.01)
    p.hand_off(young)
    while d.state(young.transfer_id) is not S.PREEMPTED:
        d.run_step()
    d.leave(clients[1])
    d.run()
    assert d.shown[clients[0]] == old.answer
    d.all_returned()


def test_a_request_alone_in_a_pool_it_just_fits_finishes() -> None:
    d, p = small_pool(4)
    request = Request(max_tokens=10)
    client = d.generate(request)
    p.hand_off(request)
    d.run()
    assert d.shown[client] == request.answer
    d.all_returned()


# Steps that fail or hang


def test_a_step_that_fails_fails_its_requests_alone(d: Harness, p: Prefill) -> None:
    """S4."""
    first, second = list(requests(2))
    clients = [d.generate(r) for r in (first, second)]
    p.hand_off(first)
    p.hand_off(second)
    assert d.step is not None and len(d.step.decode) == 1
    d.fail_step(Fault(Reason.ENGINE_ERROR, "out of memory"))
    assert d.reason(clients[0]) is Reason.ENGINE_ERROR
    assert d.refused[clients[0]].code is Code.INTERNAL
    d.run()
    assert d.shown[clients[1]] == second.answer


def test_the_report_of_another_step_is_late(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    p.hand_off(request)
    assert d.step is not None
    d.feed(ev.StepDone(d.step.step + 1, [], []))
    d.feed(ev.StepFailed(d.step.step - 1, Fault(Reason.ENGINE_ERROR, "late")))
    assert d.late == 2
    d.run()
    assert d.shown[client] == request.answer


def test_tokens_of_a_request_that_has_ended_are_dropped(d: Harness, p: Prefill) -> None:
    gone, stays = list(requests(2))
    clients = [d.generate(r) for r in (gone, stays)]
    p.hand_off(gone)
    p.hand_off(stays)
    d.run_step()
    d.leave(clients[0])
    d.run()
    assert d.shown[clients[0]] == gone.answer[:2]
    assert d.shown[clients[1]] == stays.answer


def test_a_stuck_engine_fails_what_waits_for_it_and_says_so(d: Harness, p: Prefill) -> None:
    """S13."""
    stuck, reserved = list(requests(2))
    client, other = (d.generate(r, budget_s=900.0) for r in (stuck, reserved))
    p.hand_off(stuck)
    local = d.generate(Request(prompt=[9, 9]), budget_s=900.0, local=True)
    d.advance_alive(p, d.config.no_progress_s)
    assert d.ready is not None and not d.ready[0] and "no progress" in d.ready[1]
    assert {d.reason(c) for c in (client, local)} == {Reason.ENGINE_STUCK}
    assert d.refused[client].code is Code.UNAVAILABLE
    assert other not in d.refused
    for call in (p.allocate(reserved), d.generate(Request("t-9")), d.generate(stuck, local=True)):
        assert d.reason(call) is Reason.ENGINE_STUCK
    assert d.pool.free < d.pool.total, "the engine may still write"
    d.run_step()
    assert d.ready == (True, "")
    assert p.granted(reserved)
    d.leave(other)


def test_what_is_handed_over_to_a_stuck_engine_fails_as_well(d: Harness, p: Prefill) -> None:
    first, second = list(requests(2))
    d.generate(first, budget_s=900.0)
    client = d.generate(second, budget_s=900.0)
    p.hand_off(first)
    grant = p.granted(second, budget_s=900.0)
    for _ in range(int(d.config.no_progress_s / 5)):
        d.advance(5.0)
        p.heartbeat(grant)
    assert d.ready is not None and not d.ready[0]
    d.receive(grant, second.tokens)
    p.first_token(second, grant)
    d.advance(d.config.no_progress_s)
    assert d.reason(client) is Reason.ENGINE_STUCK
    d.run_step()


def test_an_engine_that_returns_while_draining_does_not_turn_ready(d: Harness, p: Prefill) -> None:
    request = Request()
    d.generate(request, budget_s=900.0)
    p.hand_off(request)
    d.advance(d.config.no_progress_s)
    d.feed(ev.DrainRequested(30.0))
    d.run_step()
    assert d.ready is not None and not d.ready[0]


# Requests that are prefilled here


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17, 40])
def test_a_request_of_our_own_gives_the_same_answer(d: Harness, length: int) -> None:
    request = Request(prompt=list(range(100, 100 + length)), request_id="r")
    client = d.generate(request, local=True)
    d.run()
    assert d.shown[client] == request.answer
    assert d.finished[client].usage == types_pb2.Usage(prompt_tokens=length, completion_tokens=5)


def test_a_request_of_our_own_goes_on_where_another_ended(d: Harness) -> None:
    whole = Request(max_tokens=6)
    rest = Request(max_tokens=6, generated=whole.answer[:2])
    client = d.generate(rest, local=True)
    d.run()
    assert d.shown[client] == whole.answer[2:]


def test_one_token_of_our_own(d: Harness) -> None:
    request = Request(max_tokens=1)
    client = d.generate(request, local=True)
    d.run()
    assert d.shown[client] == request.answer


def test_own_and_handed_over_requests_share_steps(d: Harness, p: Prefill) -> None:
    own, other = list(requests(2))
    clients = [d.generate(other), d.generate(own, local=True)]
    p.hand_off(other)
    d.run()
    assert [d.shown[c] for c in clients] == [other.answer, own.answer]
    assert any(plan.prefill for plan in d.steps)


def test_the_same_request_id_twice_is_refused_and_the_first_unharmed(d: Harness) -> None:
    """S5, F14."""
    request = Request(request_id="r")
    client = d.generate(request, local=True)
    second = d.generate(request, local=True)
    assert d.reason(second) is Reason.DUPLICATE_REQUEST
    assert d.refused[second].code is Code.ALREADY_EXISTS
    d.run()
    assert d.shown[client] == request.answer
    again = d.generate(request, local=True)
    d.run()
    assert d.shown[again] == request.answer


def test_the_answer_of_an_own_request_says_where_its_time_went(d: Harness, p: Prefill) -> None:
    holder, own = Request("t-holder", prompt=list(range(100, 148))), Request()
    own.prompt = list(range(300, 315))
    p.granted(holder)
    client = d.generate(own, local=True)
    d.advance(3.0)
    p.release(holder)
    for _ in range(2):  # two chunks
        d.advance(0.5)
        d.run_step()
    d.advance(7.0)
    d.run()
    expected = types_pb2.Timings(queue=duration(3.0), compute=duration(1.0))
    assert d.finished[client].timings == expected


def test_the_answer_of_a_hand_over_leaves_its_times_to_the_prefill(d: Harness, p: Prefill) -> None:
    client = d.generate(Request())
    p.hand_off(Request())
    d.run()
    assert d.finished[client].timings is None


def test_own_requests_wait_for_blocks_in_the_same_queue(d: Harness, p: Prefill) -> None:
    holder = Request("t-holder", prompt=list(range(100, 148)))
    p.granted(holder)
    own = Request(prompt=list(range(300, 340)))
    client = d.generate(own, local=True)
    assert d.step is None
    p.release(holder)
    d.run()
    assert d.shown[client] == own.answer


@pytest.mark.parametrize("stage", ["allocate", "prefill", "decode"])
def test_the_time_of_an_own_request_ends_in_a_stage(d: Harness, p: Prefill, stage: str) -> None:
    own = Request(prompt=list(range(300, 340)))
    holder = Request("t-holder", prompt=list(range(100, 148)))
    if stage == "allocate":
        p.granted(holder)
    client = d.generate(own, budget_s=4.0, local=True)
    if stage == "decode":
        while client not in d.shown:
            d.run_step()
    d.advance(4.0)
    assert d.refused[client].metadata == {"stage": stage}
    if stage == "allocate":
        p.release(holder)
    else:
        d.run_step()


@pytest.mark.parametrize("after_steps", [0, 1, 2, 6])
def test_an_own_client_may_leave_at_any_time(d: Harness, after_steps: int) -> None:
    client = d.generate(Request(prompt=list(range(300, 340))), local=True)
    for _ in range(after_steps):
        d.run_step()
    d.leave(client)
    d.run()


def test_a_step_that_fails_while_prefilling_fails_the_request(d: Harness) -> None:
    client = d.generate(Request(), local=True)
    d.fail_step(Fault(Reason.ENGINE_ERROR, "no"))
    assert d.reason(client) is Reason.ENGINE_ERROR


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("token_ids", {"token_ids": inference_pb2.TokenIds()}),
        ("text", {"text": "not tokens"}),
        ("token_ids.ids[0]", {"token_ids": inference_pb2.TokenIds(ids=[1000])}),
        ("generated_token_ids[1]", {"generated_token_ids": [1, 1000]}),
        ("generated_token_ids", {"generated_token_ids": [1] * 5}),
        ("request_id", {"request_id": "x" * 200}),
    ],
)
def test_a_malformed_request_names_the_field(
    d: Harness, field: str, fields: dict[str, Any]
) -> None:
    client = d.generate(Request(), local=True, **fields)
    assert d.reason(client) is Reason.BAD_REQUEST
    assert field in [wrong.field for wrong in d.refused[client].fields]
