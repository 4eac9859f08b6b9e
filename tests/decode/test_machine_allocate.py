"""Allocate and Release: replays, tombstones, the queue, and what is refused."""

from __future__ import annotations

import pytest

from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.faults import Code, Fault, Quota, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import sampling_pb2, types_pb2
from tests.decode.harness import Harness
from tests.decode.messages import BLOCK, Request, requests
from tests.decode.prefill_peer import Prefill

LENGTH = types_pb2.FINISH_REASON_LENGTH
LARGE = list(range(100, 148))
"""Takes 13 of the 16 blocks, so that a second one waits."""


def large(transfer_id: str, **fields: object) -> Request:
    return Request(transfer_id, prompt=LARGE, **fields)  # type: ignore[arg-type]


# Replays


def test_the_same_body_gets_the_same_answer(d: Harness, p: Prefill) -> None:
    request = Request()
    first = p.allocate(request)
    again = p.allocate(request, budget_s=3.0, max_wait_s=0.0)
    assert d.answers[again] == d.answers[first]
    assert d.pool.free == d.pool.total - 2
    p.release(request)


def test_a_replay_shortens_the_budget_and_never_lengthens_it(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    p.granted(request, budget_s=50.0)
    p.allocate(request, budget_s=3.0)
    p.allocate(request, budget_s=60.0)
    d.advance(2.9)
    assert client not in d.refused
    d.advance(0.1)
    assert d.reason(client) is Reason.STAGE_DEADLINE


def test_a_replay_after_hand_off_gets_the_same_answer(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    grant = p.hand_off(request)
    again = p.allocate(request)
    assert d.answers[again].grant_id == grant
    d.run()
    assert d.shown[client] == request.answer


def test_another_body_is_refused_and_the_first_unharmed(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    other = p.allocate(request, prompt_tokens=5)
    assert d.reason(other) is Reason.DUPLICATE_TRANSFER
    d.receive(grant, request.tokens)
    p.first_token(request, grant)
    d.run()
    assert d.shown[client] == request.answer


def test_repeated_calls_wait_together(d: Harness, p: Prefill) -> None:
    first, second = large("t-1"), large("t-2")
    p.granted(first)
    calls = [p.allocate(second) for _ in range(3)]
    assert d.state("t-2") is S.WAITING
    assert not any(call in d.answers for call in calls)
    p.release(first)
    assert {d.answers[call].grant_id for call in calls} == {d.transfer("t-2").grant_id}
    p.release(second)


def test_the_queue_is_left_when_the_last_caller_goes(d: Harness, p: Prefill) -> None:
    first, second = large("t-1"), large("t-2")
    p.granted(first)
    calls = [p.allocate(second) for _ in range(2)]
    d.end_allocate(calls[0])
    assert d.state("t-2") is S.WAITING
    d.end_allocate(calls[1])
    assert d.machine.find("t-2", 1) is None
    p.release(first)
    assert p.granted(second), "it may be asked for again"
    p.release(second)


def test_a_client_that_waits_outlives_the_allocate(d: Harness, p: Prefill) -> None:
    first, second = large("t-1"), large("t-2")
    p.granted(first)
    client = d.generate(second)
    call = p.allocate(second)
    d.end_allocate(call)
    assert d.state("t-2") is S.EXPECTED
    p.release(first)
    other = Prefill(d, "p2")
    other.hand_off(second)
    d.run()
    assert d.shown[client] == second.answer


def test_replays_of_release_and_first_token_answer_what_is_recorded(d: Harness, p: Prefill) -> None:
    request = Request()
    grant = p.granted(request)
    answers = [d.answers[p.release(request)].state for _ in range(2)]
    assert answers == [types_pb2.TRANSFER_STATE_RELEASED] * 2
    call = p.first_token(request, grant)
    assert d.answers[call].state == types_pb2.TRANSFER_STATE_RELEASED
    assert d.late == 2


def test_a_replay_of_the_first_token_shows_it_once(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    calls = [p.first_token(request, grant) for _ in range(2)]
    assert [d.answers[c].state for c in calls] == [types_pb2.TRANSFER_STATE_RESERVED] * 2
    assert d.shown[client] == request.answer[:1]
    d.receive(grant, request.tokens)
    late = p.first_token(request, grant)
    assert d.answers[late].state == types_pb2.TRANSFER_STATE_DECODING
    d.run()
    assert d.shown[client] == request.answer


def test_another_first_token_is_refused(d: Harness, p: Prefill) -> None:
    request = Request()
    grant = p.granted(request)
    p.first_token(request, grant)
    other = p.first_token(request, grant, token=500)
    assert d.reason(other) is Reason.DUPLICATE_TRANSFER
    p.release(request)


def test_a_first_token_after_the_lease_has_ended_is_told_so(d: Harness, p: Prefill) -> None:
    """S11: it changes nothing."""
    request = Request()
    grant = p.granted(request)
    while d.machine.find("t-1", 1):
        d.advance(4.0)
        p.heartbeat()
    call = p.first_token(request, grant)
    assert d.answers[call].state == types_pb2.TRANSFER_STATE_EXPIRED


# Tombstones


def test_a_release_that_overtook_its_allocate_refuses_it(d: Harness, p: Prefill) -> None:
    request = Request()
    gone = Fault(Reason.CLIENT_GONE, "left")
    assert d.answers[p.release(request, gone)].state == types_pb2.TRANSFER_STATE_FAILED
    call = p.allocate(request)
    assert d.reason(call) is Reason.RELEASED
    assert d.refused[call].code is Code.ABORTED
    client = d.generate(request)
    assert d.reason(client) is Reason.CLIENT_GONE, "the cause reaches the client that comes late"


def test_a_tombstone_is_forgotten_after_its_time(d: Harness, p: Prefill) -> None:
    request = Request()
    p.release(request)
    d.advance_alive(p, d.config.tombstone_s - 0.5)
    assert d.reason(p.allocate(request)) is Reason.RELEASED
    d.advance_alive(p, 0.5)
    p.granted(request)
    p.release(request)


def test_a_released_client_hears_why(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    p.granted(request)
    cause = Fault(Reason.ENGINE_ERROR, "the prefill engine raised")
    assert d.answers[p.release(request, cause)].state == types_pb2.TRANSFER_STATE_FAILED
    assert d.reason(client) is Reason.ENGINE_ERROR
    assert d.refused[client].message == "the prefill engine raised"


def test_a_release_without_a_cause_is_an_end_all_the_same(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    p.granted(request)
    p.release(request)
    assert d.reason(client) is Reason.RELEASED


def test_a_release_with_a_status_of_the_transport_means_the_prefill_is_lost(
    d: Harness, p: Prefill
) -> None:
    request = Request()
    client = d.generate(request)
    p.granted(request)
    message = p.release_request(request)
    message.cause.code = Code.UNAVAILABLE
    message.cause.message = "connection reset"
    d.release(message)
    assert d.reason(client) is Reason.PREFILL_LOST


@pytest.mark.parametrize("state", [S.EXPECTED, S.WAITING, S.RESERVED, S.RECEIVING, S.READY])
def test_release_frees_in_every_state_before_hand_off(d: Harness, p: Prefill, state: S) -> None:
    request = Request(prompt=LARGE)
    blocker = large("t-blocker")
    client = d.generate(request)
    if state is S.WAITING:
        p.granted(blocker)
    d.bring(p, request, state)
    p.release(request, Fault(Reason.SENDER_STUCK, "stuck"))
    assert d.reason(client) is Reason.SENDER_STUCK
    if state is S.WAITING:
        p.release(blocker)


def test_release_after_hand_off_changes_nothing(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    p.hand_off(request)
    call = p.release(request, Fault(Reason.CLIENT_GONE, "left"))
    assert d.answers[call].state == types_pb2.TRANSFER_STATE_DECODING
    d.run()
    assert d.shown[client] == request.answer


# The queue


def test_first_in_first_out_and_the_head_is_not_overtaken(d: Harness, p: Prefill) -> None:
    holder = large("t-holder")
    p.granted(holder)
    big, small = large("t-big"), Request("t-small")
    calls = [p.allocate(big), p.allocate(small)]
    assert d.pool.free >= 2, "the small one would fit"
    assert d.state("t-small") is S.WAITING
    p.release(holder)
    assert calls[0] in d.answers and calls[1] in d.answers
    p.release(big)
    p.release(small)


def test_the_queue_is_bounded() -> None:
    d = Harness(allocate_queue=2)
    p = Prefill(d)
    p.granted(large("t-0"))
    waiting = [large(f"t-{i}") for i in (1, 2)]
    for request in waiting:
        p.allocate(request)
    refused = p.allocate(large("t-3"))
    fault = d.refused[refused]
    assert fault.reason is Reason.QUEUE_FULL and fault.code is Code.RESOURCE_EXHAUSTED
    assert fault.retry_after_s == 0.25
    assert fault.quota == Quota(needed=13, free=3)
    local = d.generate(Request(prompt=LARGE), local=True)
    assert d.refused[local].reason is Reason.QUEUE_FULL
    assert d.refused[local].retry_after_s == 0.25
    for request in (large("t-0"), *waiting):
        p.release(request)
    d.all_returned()


def test_blocks_that_do_not_come_in_time_are_a_refusal(d: Harness, p: Prefill) -> None:
    """F44, F47: it has its own code, and the client may be sent elsewhere."""
    p.granted(large("t-1"))
    client = d.generate(large("t-2"))
    call = p.allocate(large("t-2"), max_wait_s=3.0)
    d.advance(2.9)
    assert call not in d.refused
    d.advance(0.2)
    fault = d.refused[call]
    assert fault.reason is Reason.NO_BLOCKS and fault.code is Code.RESOURCE_EXHAUSTED
    assert fault.retry_after_s == 0.25 and fault.quota == Quota(needed=13, free=3)
    assert d.state("t-2") is S.EXPECTED and client not in d.refused
    p.release(large("t-1"))
    p.release(large("t-2"))


def test_each_of_the_calls_that_wait_together_waits_as_long_as_it_asked(
    d: Harness, p: Prefill
) -> None:
    holder, waiting = large("t-1"), large("t-2")
    p.granted(holder)
    long, short = p.allocate(waiting, max_wait_s=5.0), p.allocate(waiting, max_wait_s=2.0)
    at_once = p.allocate(waiting, max_wait_s=0.0)
    assert d.reason(at_once) is Reason.NO_BLOCKS
    d.advance(2.0)
    assert d.reason(short) is Reason.NO_BLOCKS
    assert d.state("t-2") is S.WAITING and long not in d.refused
    longer = p.allocate(waiting, max_wait_s=50.0)
    d.advance(3.0)
    assert d.reason(long) is Reason.NO_BLOCKS
    p.release(holder)
    assert longer in d.answers
    p.release(waiting)


def test_who_leaves_early_does_not_shorten_the_wait_of_another(d: Harness, p: Prefill) -> None:
    holder, waiting = large("t-1"), large("t-2")
    p.granted(holder)
    short, long = p.allocate(waiting, max_wait_s=2.0), p.allocate(waiting, max_wait_s=5.0)
    d.end_allocate(short)
    d.advance(4.9)
    assert long not in d.refused
    d.advance(0.1)
    assert d.reason(long) is Reason.NO_BLOCKS
    p.release(holder)


def test_an_allocate_that_ends_without_a_grant_is_an_end_that_may_be_asked_again(
    d: Harness, p: Prefill
) -> None:
    holder, waiting = large("t-1"), large("t-2")
    p.granted(holder)
    p.allocate(waiting, max_wait_s=2.0)
    d.advance(2.0)
    assert d.path("t-2") == [S.EXPECTED, S.WAITING, S.RELEASED]
    last = d.changes[-1]
    assert last.fault is not None and last.fault.reason is Reason.NO_BLOCKS
    assert last.ended is not None and last.ended.state is S.RELEASED
    assert d.machine.ledger.counts[S.RELEASED] == 1
    p.release(holder)
    assert p.granted(waiting)
    p.release(waiting)


def test_the_clients_that_wait_for_their_prefill_are_bounded() -> None:
    d = Harness(client_legs=2)
    p = Prefill(d)
    first, second, third = (Request(f"t-{i}") for i in range(3))
    clients = [d.generate(first), d.generate(second)]
    fault = d.refused[d.generate(third)]
    assert fault.reason is Reason.QUEUE_FULL and fault.code is Code.RESOURCE_EXHAUSTED
    assert fault.retry_after_s == 0.25 and fault.quota == Quota(needed=2, free=16)
    p.granted(first)
    clients.append(d.generate(third))
    assert d.state("t-2") is S.EXPECTED, "the first waits for its KV now"
    for client in clients:
        d.leave(client)
    d.all_returned()


def test_no_wait_means_an_answer_at_once(d: Harness, p: Prefill) -> None:
    p.granted(large("t-1"))
    call = p.allocate(large("t-2"), max_wait_s=0.0)
    assert d.reason(call) is Reason.NO_BLOCKS
    assert d.machine.find("t-2", 1) is None
    p.release(large("t-1"))


def test_what_could_never_fit_is_refused_with_the_numbers(d: Harness, p: Prefill) -> None:
    request = Request(prompt=LARGE, max_tokens=40)
    call = p.allocate(request)
    assert d.reason(call) is Reason.TOO_LARGE
    assert d.refused[call].metadata == {"needed": "88", "total": "64", "unit": "tokens"}
    client = d.generate(request)
    assert d.reason(client) is Reason.TOO_LARGE


def test_what_the_pool_could_never_hold_is_refused_with_the_numbers() -> None:
    d = Harness(num_blocks=4)
    p = Prefill(d)
    call = p.allocate(Request(prompt=list(range(100, 110)), max_tokens=7))
    assert d.refused[call].metadata == {"needed": "5", "total": "4", "unit": "blocks"}
    d.all_returned()


def test_what_needs_no_blocks_may_be_larger_than_the_pool() -> None:
    d = Harness(num_blocks=4)
    p = Prefill(d)
    request = Request(prompt=list(range(100, 130)), max_tokens=1)
    client = d.generate(request)
    grant = p.granted(request, kv_needed=False)
    p.first_token(request, grant, finish=types_pb2.FINISH_REASON_LENGTH)
    assert d.shown[client] == request.answer
    local = d.generate(request, local=True)
    assert d.reason(local) is Reason.TOO_LARGE
    d.all_returned()


def test_a_prompt_longer_than_the_model_names_the_field_and_the_limit(
    d: Harness, p: Prefill
) -> None:
    call = p.allocate(Request(prompt=list(range(100, 164))))
    (wrong,) = d.refused[call].fields
    assert wrong.field == "prompt_tokens" and "at most 63" in wrong.description


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt_tokens", {"prompt_tokens": 0}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("prompt_digest", {"prompt_digest": b"short"}),
        ("request_id", {"request_id": "x" * 129}),
        ("sampling.max_tokens", {"sampling": sampling_pb2.SamplingParams()}),
        (
            "sampling.temperature",
            {"sampling": sampling_pb2.SamplingParams(max_tokens=5, temperature=-1)},
        ),
        ("ref.transfer_id", {"ref": types_pb2.TransferRef(transfer_id="a b", attempt=1)}),
        ("ref.attempt", {"ref": types_pb2.TransferRef(transfer_id="a")}),
    ],
)
def test_a_malformed_allocate_names_the_field(
    d: Harness, p: Prefill, field: str, fields: dict[str, object]
) -> None:
    call = p.allocate(Request(), **fields)
    assert d.reason(call) is Reason.BAD_REQUEST
    assert field in [wrong.field for wrong in d.refused[call].fields]
    assert d.pool.free == d.pool.total


def test_a_reserved_field_is_refused_as_not_built(d: Harness, p: Prefill) -> None:
    call = p.allocate(Request(), scope=sampling_pb2.RequestScope(adapter="lora"))
    assert d.reason(call) is Reason.FEATURE
    assert d.refused[call].metadata == {"feature": "scope.adapter"}
    logprobs = sampling_pb2.SamplingParams(max_tokens=5, logprobs=0)
    call = p.allocate(Request(), sampling=logprobs)
    assert d.refused[call].metadata == {"feature": "sampling.logprobs"}


def test_logprobs_over_a_hand_over_need_a_prefill_that_has_them() -> None:
    d = Harness(features=frozenset({"logprobs"}))
    plain, able = Prefill(d), Prefill(d, "p-able", features=["logprobs", "telepathy"])
    logprobs = sampling_pb2.SamplingParams(max_tokens=5, logprobs=0)
    call = plain.allocate(Request(), sampling=logprobs)
    assert d.reason(call) is Reason.FEATURE
    assert d.refused[call].metadata == {"feature": "sampling.logprobs"}
    assert d.told[able.stream][0].welcome.features == ["logprobs"]
    able.granted(Request(), sampling=logprobs)
    able.release(Request())
    d.all_returned()


def test_an_allocate_whose_time_is_over_is_refused_at_once(d: Harness, p: Prefill) -> None:
    """F46: nothing restarts a deadline."""
    call = p.allocate(Request(), budget_s=0.0)
    assert d.reason(call) is Reason.STAGE_DEADLINE
    assert d.refused[call].metadata == {"stage": "allocate"}


def test_without_a_budget_the_default_counts(d: Harness, p: Prefill) -> None:
    grant = p.granted(Request(), budget_s=None)
    while d.machine.find("t-1", 1):
        d.advance(4.0)
        p.heartbeat(grant)
    assert d.now - 1000.0 == pytest.approx(d.config.request_budget_s, abs=4.0)
    assert d.path()[-1] is S.FAILED


def test_a_pool_too_small_for_all_at_once_serves_all(d: Harness, p: Prefill) -> None:
    asked = list(requests(20, max_tokens=9))
    clients = {r.transfer_id: d.generate(r) for r in asked}
    calls = {r.transfer_id: p.allocate(r) for r in asked}
    handed: set[str] = set()
    for _ in range(1000):
        ready = [r for r in asked if calls[r.transfer_id] in d.answers]
        for request in ready:
            if request.transfer_id in handed:
                continue
            handed.add(request.transfer_id)
            grant = d.answers[calls[request.transfer_id]].grant_id
            d.receive(grant, request.tokens)
            p.first_token(request, grant)
        if d.step is None:
            break
        d.run_step()
    assert {r.transfer_id: d.shown[clients[r.transfer_id]] for r in asked} == {
        r.transfer_id: r.answer for r in asked
    }


def test_the_welcome_and_the_grant_say_how_long_they_live(d: Harness, p: Prefill) -> None:
    call = p.allocate(Request())
    assert d.answers[call].lease == duration(d.config.lease_s)
    ((start, count),) = d.opened[d.answers[call].grant_id].wanted
    assert start == 0 and count * BLOCK >= 6
    p.release(Request())
