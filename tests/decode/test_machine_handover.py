"""The hand-over as lists of events: every order in which KV, first token and client may come."""

from __future__ import annotations

from itertools import permutations

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.engine.stopping import Finish
from pd_grpc.protocol.faults import Code, Reason
from pd_grpc.v1 import sampling_pb2, types_pb2
from tests.decode.harness import Harness
from tests.decode.messages import BLOCK, SHARD, Request, answer_of
from tests.decode.prefill_peer import Prefill

LENGTH = types_pb2.FINISH_REASON_LENGTH
STOP = types_pb2.FINISH_REASON_STOP


def test_a_request_goes_all_the_way(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    assert d.state() is S.EXPECTED
    grant = p.granted(request)
    assert d.state() is S.RESERVED
    d.feed(ev.ReceiveStarted(grant))
    assert d.state() is S.RECEIVING
    p.first_token(request, grant)
    assert d.shown[client] == request.answer[:1], "the first token is shown before the KV is here"
    assert d.state() is S.RECEIVING
    assert d.step is None, "no token from unverified KV"
    d.complete(grant, request.tokens)
    assert d.state() is S.DECODING
    d.run()
    assert d.shown[client] == request.answer
    assert d.finished[client].reason is Finish.LENGTH
    assert d.finished[client].usage == types_pb2.Usage(prompt_tokens=6, completion_tokens=5)
    assert d.path() == [S.EXPECTED, S.RESERVED, S.RECEIVING, S.READY, S.DECODING, S.FINISHED]
    assert d.ended_for(p.stream) == [], "what was handed off is none of P's business"


def test_the_cache_info_says_where_the_kv_goes(d: Harness, p: Prefill) -> None:
    request = Request(prompt=list(range(100, 100 + 2 * BLOCK)))
    call = p.allocate(request)
    answer = d.answers[call]
    assert answer.wanted == [types_pb2.BlockRange(start=0, count=2)]
    assert list(answer.shards) == [SHARD]
    opened = d.opened[answer.grant_id]
    assert opened.wanted == ((0, 2),)
    assert len(opened.blocks) == 3, "a prompt of whole blocks needs one more for what follows"
    p.release(request)


@pytest.mark.parametrize("order", list(permutations(["client", "kv", "first"])))
def test_hand_off_happens_whatever_comes_first(
    d: Harness, p: Prefill, order: tuple[str, ...]
) -> None:
    request = Request()
    grant = p.granted(request)
    client = 0
    for what in order:
        assert d.step is None
        if what == "client":
            client = d.generate(request)
        elif what == "kv":
            d.receive(grant, request.tokens)
        else:
            p.first_token(request, grant)
    assert d.state() is S.DECODING
    d.run()
    assert d.shown[client] == request.answer


@pytest.mark.parametrize("client_first", [True, False])
def test_generated_tokens_are_output_and_not_shown_again(
    d: Harness, p: Prefill, client_first: bool
) -> None:
    request = Request(generated=[11, 12], max_tokens=5)
    client = d.generate(request) if client_first else 0
    grant = p.hand_off(request)
    client = client or d.generate(request)
    d.run()
    assert d.shown[client] == request.answer
    assert len(d.shown[client]) == 3
    assert d.finished[client].usage.completion_tokens == 5
    assert d.opened[grant].wanted == ((0, 2),), (
        "six of the prompt and two of output fill two blocks"
    )


def test_decoding_grows_over_block_borders(d: Harness, p: Prefill) -> None:
    request = Request(max_tokens=30)
    client = d.generate(request)
    p.hand_off(request)
    d.run()
    assert d.shown[client] == request.answer


# A first token that ends the request


def reach(d: Harness, p: Prefill, request: Request, state: S) -> str:
    grant = p.granted(request)
    if state in (S.RECEIVING, S.READY):
        d.feed(ev.ReceiveStarted(grant))
    if state is S.READY:
        d.complete(grant, request.tokens)
    assert d.state() is state
    return grant


@pytest.mark.parametrize("state", [S.RESERVED, S.RECEIVING, S.READY])
def test_a_first_token_that_ends_the_request_finishes_it(d: Harness, p: Prefill, state: S) -> None:
    request = Request()
    client = d.generate(request)
    grant = reach(d, p, request, state)
    call = p.first_token(request, grant, finish=STOP)
    assert d.answers[call].state == types_pb2.TRANSFER_STATE_FINISHED
    assert d.shown[client] == request.answer[:1]
    assert d.finished[client].reason is Finish.STOP
    assert d.finished[client].usage.completion_tokens == 1
    assert d.path()[-1] is S.FINISHED
    assert d.ended_for(p.stream) == [], "the call's own answer says so already"


@pytest.mark.parametrize("state", [S.RESERVED, S.RECEIVING, S.READY])
def test_an_answer_one_token_long_is_kept_for_a_client_that_comes_late(
    d: Harness, p: Prefill, state: S
) -> None:
    request = Request()
    grant = reach(d, p, request, state)
    call = p.first_token(request, grant, finish=LENGTH)
    assert d.answers[call].state == types_pb2.TRANSFER_STATE_FINISHED
    d.all_returned()
    d.advance(d.config.tombstone_s - 1)
    client = d.generate(request)
    assert d.shown[client] == request.answer[:1]
    assert d.finished[client].reason is Finish.LENGTH
    assert d.finished[client].usage == types_pb2.Usage(prompt_tokens=6, completion_tokens=1)


def test_a_kept_answer_is_not_given_to_another_request(d: Harness, p: Prefill) -> None:
    request = Request()
    p.first_token(request, p.granted(request), finish=LENGTH)
    client = d.generate(Request(prompt=[9, 9, 9, 9, 9, 9]))
    assert d.refused[client].reason is Reason.HANDOFF_MISMATCH
    assert d.refused[client].code is Code.INTERNAL
    assert d.refused[client].metadata == {"part": "prompt_digest"}
    assert client not in d.shown


def test_the_first_token_ends_the_request_by_our_own_rule_too(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    p.first_token(request, grant, token=2)
    assert d.shown[client] == [2]
    assert d.finished[client].reason is Finish.STOP


def test_kv_that_is_not_needed_costs_no_blocks(d: Harness, p: Prefill) -> None:
    request = Request(max_tokens=1)
    client = d.generate(request)
    call = p.allocate(request, kv_needed=False)
    answer = d.answers[call]
    assert not answer.wanted and not answer.shards
    assert d.opened == {} and d.pool.free == d.pool.total
    assert d.state() is S.RESERVED
    p.first_token(request, answer.grant_id, finish=LENGTH)
    assert d.shown[client] == request.answer
    assert d.finished[client].reason is Finish.LENGTH


def test_kv_that_is_not_needed_is_granted_ahead_of_those_that_wait(d: Harness, p: Prefill) -> None:
    big = Request("t-big", prompt=list(range(100, 150)))
    other = Request("t-other", prompt=list(range(200, 250)))
    small = Request("t-small", max_tokens=1)
    p.granted(big)
    waits = p.allocate(other)
    assert waits not in d.answers
    grant = p.granted(small, kv_needed=False)
    p.first_token(small, grant, finish=LENGTH)
    p.release(big)
    p.release(other)


def test_a_first_token_without_an_end_is_refused_where_no_kv_is_needed(
    d: Harness, p: Prefill
) -> None:
    request = Request(max_tokens=1)
    grant = p.granted(request, kv_needed=False)
    call = p.first_token(request, grant)
    assert [f.field for f in d.refused[call].fields] == ["tokens[0].finish_reason"]
    p.release(request)


def test_a_first_token_outside_the_vocabulary_is_refused_and_nothing_is_lost(
    d: Harness, p: Prefill
) -> None:
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    call = p.first_token(request, grant, token=1000)
    assert [f.field for f in d.refused[call].fields] == ["tokens[0].token_id"]
    assert client not in d.shown
    p.first_token(request, grant)
    assert d.shown[client] == request.answer[:1]
    p.release(request)


def test_an_unknown_finish_reason_is_refused(d: Harness, p: Prefill) -> None:
    request = Request()
    grant = p.granted(request)
    call = p.first_token(request, grant, finish=9)
    assert [f.field for f in d.refused[call].fields] == ["tokens[0].finish_reason"]
    p.release(request)


def test_a_sibling_is_refused_as_not_built(d: Harness, p: Prefill) -> None:
    request = Request()
    grant = p.granted(request)
    call = d.number()
    message = p.first_token_request(request, grant)
    message.tokens[0].sibling = 1
    d.feed(ev.FirstTokenCalled(call, message))
    assert d.reason(call) is Reason.FEATURE
    del message.tokens[:]
    d.feed(ev.FirstTokenCalled(call + 1000, message))
    assert d.reason(call + 1000) is Reason.BAD_REQUEST
    p.release(request)


def test_a_first_token_with_another_grant_is_out_of_order(d: Harness, p: Prefill) -> None:
    request = Request()
    p.granted(request)
    call = p.first_token(request, "g-of-another")
    assert d.reason(call) is Reason.WRONG_STATE
    assert d.refused[call].metadata == {"state": "RESERVED"}
    p.release(request)


def test_a_first_token_of_nothing_is_unknown(d: Harness, p: Prefill) -> None:
    call = p.first_token(Request(), "g-none")
    assert d.reason(call) is Reason.UNKNOWN_TRANSFER


# Both legs must mean the same request


@pytest.mark.parametrize("client_first", [True, False])
@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("prompt_tokens", Request(prompt=list(range(100, 107)))),
        ("prompt_digest", Request(prompt=list(range(101, 107)))),
        ("max_new_tokens", None),
        ("sampling", Request(max_tokens=6)),
    ],
)
def test_legs_that_differ_fail_both(
    d: Harness, p: Prefill, client_first: bool, part: str, other: Request | None
) -> None:
    request = Request()
    fields = {} if other is not None else {"max_new_tokens": 3}
    if client_first:
        client = d.generate(other or request)
        allocate = p.allocate(request, **fields)
        told = d.refused[allocate]
        assert d.ended_for(p.stream) == []
    else:
        p.allocate(request, **fields)
        client = d.generate(other or request)
        (ended,) = d.ended_for(p.stream)
        assert ended.ref == request.ref
        assert ended.status.code == Code.INVALID_ARGUMENT
        assert ended.state == types_pb2.TRANSFER_STATE_FAILED
        told = d.refused[client]
    assert told.reason is Reason.HANDOFF_MISMATCH
    assert told.metadata == {"part": part}
    assert d.reason(client) is Reason.HANDOFF_MISMATCH
    assert d.refused[client].code is Code.INTERNAL
    assert d.path()[-1] is S.FAILED


def test_legs_that_say_the_same_in_other_words_agree(d: Harness, p: Prefill) -> None:
    request = Request()
    grant = p.granted(request)
    same = sampling_pb2.SamplingParams(max_tokens=5, temperature=0, seed=7, top_p=1, top_k=0)
    client = d.generate(request, sampling=same)
    d.receive(grant, request.tokens)
    p.first_token(request, grant)
    d.run()
    assert d.shown[client] == request.answer == answer_of(request.prompt, 5)


def test_a_second_client_for_the_same_transfer_is_refused(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    second = d.generate(request)
    assert d.reason(second) is Reason.DUPLICATE_TRANSFER
    p.hand_off(request)
    d.run()
    assert d.shown[client] == request.answer
    assert second not in d.shown
