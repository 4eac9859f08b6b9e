"""D40x to D42x: the first token, before, while and after the KV comes."""

from __future__ import annotations

from pd_grpc.conformance.calls import check_feature, check_field, refusal
from pd_grpc.conformance.case import answer_s, expect, expect_equal, quiet_s
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted
from pd_grpc.conformance.decode.pool import fill, wait_in_queue
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import decode_pb2, sampling_pb2, types_pb2

AT_ONCE = "D shows it to the client at once and decodes when all KV is verified."
NOT_TAKEN = (
    types_pb2.TRANSFER_STATE_UNSPECIFIED,
    types_pb2.TRANSFER_STATE_FAILED,
    types_pb2.TRANSFER_STATE_RELEASED,
    types_pb2.TRANSFER_STATE_EXPIRED,
)


@case(401, AT_ONCE)
async def before_the_kv(d: DecodeHand) -> None:
    """The first token comes before the KV and is shown before it, alone."""
    h = await granted(d)
    await h.first_token()
    await h.leg.next()
    expect_equal(h.leg.tokens, [d.first_token(h.request)], "the tokens shown before any KV")
    await h.leg.shows_nothing(quiet_s(), "no second token without KV")
    await h.send_kv()
    await h.answers()


@case(402, AT_ONCE)
async def while_the_kv_comes(d: DecodeHand) -> None:
    """The first token comes between two chunks; no second one is shown before the last chunk."""
    h = await granted(d)
    transfer = await h.receiving()
    first, *rest = h.kv()
    await transfer.send_all([first])
    await h.first_token()
    await h.leg.next()
    await transfer.send_all(rest[:-1])
    await h.leg.shows_nothing(quiet_s(), "no second token from KV that is not all there")
    await transfer.send_all(rest[-1:])
    await transfer.complete()
    await h.answers()


@case(
    403,
    "Hand-off is the moment D holds both the verified KV and the first token, whichever"
    " comes last.",
)
async def after_the_kv(d: DecodeHand) -> None:
    """The first token comes last; D has it, and the answer is right."""
    h = await granted(d)
    await h.send_kv()
    state = await h.first_token()
    expect(state not in NOT_TAKEN, "a state that says D has taken it", state)
    await h.answers()


@case(404, "Idempotent: the same token again changes nothing and answers the state")
async def the_same_token_again(d: DecodeHand) -> None:
    """The first token comes three times and is shown once."""
    h = await granted(d)
    states = {await h.first_token() for _ in range(3)}
    expect_equal(len(states), 1, "one state for all three; distinct ones:")
    await h.send_kv()
    await h.answers()


@case(405, "ALREADY_EXISTS with DUPLICATE_TRANSFER for another first token than the one D has")
async def another_token(d: DecodeHand) -> None:
    """Another first token is refused, and the first is unharmed."""
    h = await granted(d)
    await h.first_token()
    right = d.first_token(h.request)
    other = decode_pb2.FirstToken(token_id=(right + 1) % d.subject.info.vocab_size)
    await h.first_token_refused(Reason.DUPLICATE_TRANSFER, "another first token", tokens=[other])
    await h.send_kv()
    await h.answers()


@case(406, "The token, below the vocabulary's size.")
async def a_token_beyond_the_vocabulary(d: DecodeHand) -> None:
    """A first token that is no token is refused by the field's name and hurts nothing."""
    h = await granted(d)
    beyond = decode_pb2.FirstToken(token_id=d.subject.info.vocab_size)
    what = "a token beyond the vocabulary"
    check_field(await h.first_token_refused(Reason.BAD_REQUEST, what, tokens=[beyond]), "token_id")
    await h.completes()


@case(407, "Exactly one in v1; one per sibling when that is built.")
async def none_or_two_tokens(d: DecodeHand) -> None:
    """A first token without a token, and one with two, are refused by the field's name."""
    h = await granted(d)
    token = decode_pb2.FirstToken(token_id=h.any_token)
    for tokens in ([], [token, token]):
        fault = await h.first_token_refused(
            Reason.BAD_REQUEST, f"{len(tokens)} tokens", tokens=tokens
        )
        check_field(fault, "tokens")
    await h.completes()


@case(408, "Reserved: which sibling, from 0.")
async def another_sibling(d: DecodeHand) -> None:
    """The first token of a second sibling is refused by the feature's name."""
    h = await granted(d)
    token = decode_pb2.FirstToken(token_id=h.any_token, sibling=1)
    fault = await h.first_token_refused(Reason.FEATURE, "a second sibling", tokens=[token])
    check_feature(fault, "tokens[0].sibling")
    await h.completes()


@case(409, "FAILED_PRECONDITION with WRONG_STATE when it has no grant or another one.")
async def another_grant(d: DecodeHand) -> None:
    """A first token that names another grant is refused and hurts nothing."""
    h = await granted(d)
    await h.first_token_refused(Reason.WRONG_STATE, "another grant", grant_id=d.name("g"))
    await h.completes()


@case(410, "FAILED_PRECONDITION with WRONG_STATE when it has no grant or another one.")
async def no_grant_yet(d: DecodeHand) -> None:
    """A first token is refused while the Allocate of its transfer waits for blocks."""
    p = await d.prefill()
    await fill(d, p)
    request = d.request()
    await wait_in_queue(p, request, 0)
    grant = decode_pb2.AllocateResponse(grant_id=d.name("g"))
    message = p.first_token_message(request, grant, request.prompt[0])
    await refusal(p.send_first(message), Reason.WRONG_STATE, "no grant yet")


@case(411, "NOT_FOUND with UNKNOWN_TRANSFER when D knows no Allocate of it")
async def no_allocate_yet(d: DecodeHand) -> None:
    """A first token of a transfer that D has not heard of from any P is refused."""
    p = await d.prefill()
    request = d.request()
    grant = decode_pb2.AllocateResponse(grant_id=d.name("g"))
    message = p.first_token_message(request, grant, request.prompt[0])
    await refusal(p.send_first(message), Reason.UNKNOWN_TRANSFER, "no Allocate of it")


@case(412, "a call of P's for another's transfer is PERMISSION_DENIED with NOT_OWNER.")
async def another_prefill(d: DecodeHand) -> None:
    """Another P's first token for the grant is refused and hurts nothing."""
    h = await granted(d)
    other = await d.prefill()
    session_id = other.welcome.session_id
    await h.first_token_refused(Reason.NOT_OWNER, "another's transfer", session_id=session_id)
    await h.completes()


@case(
    413,
    "A call whose session_id is unknown or superseded is FAILED_PRECONDITION with NO_SESSION.",
)
async def a_superseded_session(d: DecodeHand) -> None:
    """A first token in the name of the session before is refused; in that of the newest taken."""
    h = await granted(d)
    before = h.p.welcome.session_id
    await h.p.join()
    await h.first_token_refused(Reason.NO_SESSION, "a superseded session", session_id=before)
    await h.completes()


@case(
    414,
    "With a finish_reason it ends the transfer from any state, and missing KV is no longer wanted",
)
async def the_first_token_is_the_last(d: DecodeHand) -> None:
    """A first token that ends the answer completes it without any KV."""
    for reason in (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH):
        h = await granted(d)
        await _finishes(h, reason)


@case(415, "RELEASED also where the answer was complete before the KV was.")
async def the_stream_of_a_complete_answer(d: DecodeHand) -> None:
    """The first token ends the answer while KV comes in; its stream ends with RELEASED."""
    h = await granted(d)
    transfer = await h.receiving()
    await transfer.send_all(h.kv()[:1])
    await _finishes(h, types_pb2.FINISH_REASON_STOP)
    await transfer.refused(Reason.RELEASED, "the answer is complete")


@case(416, "the answer is kept for a client that comes within the tombstone's time.")
async def the_answer_is_kept(d: DecodeHand) -> None:
    """The first token ended the answer before the client came, who gets it all the same."""
    p = await d.prefill()
    request = d.request()
    h = HandOver(d, p, request, await p.allocate(request), None)
    state = await h.first_token(h.any_token, finish_reason=types_pb2.FINISH_REASON_STOP)
    expect_equal(state, types_pb2.TRANSFER_STATE_FINISHED, "the state")
    await h.client_comes().answers([h.any_token])
    expect_equal(h.leg.last.finish_reason, types_pb2.FINISH_REASON_STOP, "finish_reason")


@case(417, "granted at once, without blocks and without Transfer.")
async def no_kv_needed(d: DecodeHand) -> None:
    """One token is asked for: the grant costs nothing, even of a full pool, and the token ends
    it."""
    p = await d.prefill()
    await fill(d, p)
    h = await granted(d, _one_token(d), p=p, kv_needed=False, max_wait=None)
    expect(not h.grant.wanted, "no wanted blocks", h.grant)
    expect(not h.grant.shards, "no shards", h.grant)
    await _finishes(h, types_pb2.FINISH_REASON_LENGTH)


@case(418, "The first token must then carry its finish_reason.")
async def no_kv_needed_and_no_finish_reason(d: DecodeHand) -> None:
    """Without KV a first token that does not end the answer is refused by the field's name."""
    h = await granted(d, _one_token(d), kv_needed=False)
    fault = await h.first_token_refused(Reason.BAD_REQUEST, "a token that does not end it")
    check_field(fault, "finish_reason")
    await _finishes(h, types_pb2.FINISH_REASON_LENGTH)


@case(
    419,
    "Once all KV is verified D awaits the first token for Welcome.first_token, then the transfer "
    'fails with STAGE_DEADLINE and the stage "first_token".',
)
async def the_first_token_never_comes(d: DecodeHand) -> None:
    """All KV is there and no first token comes: client and P hear which stage took too long."""
    h = await granted(d)
    await h.send_kv()
    limit = d.times.first_token + answer_s()
    fault = await h.leg.fails(Reason.STAGE_DEADLINE, "no first token came", limit)
    expect_equal(fault.metadata.get("stage"), "first_token", "the stage")
    ended = await h.p.told_of(h.request, "transfer_ended, for no first token came")
    expect_equal(ended.state, types_pb2.TRANSFER_STATE_FAILED, "state")


def _one_token(d: DecodeHand) -> Request:
    return d.request(sampling=sampling_pb2.SamplingParams(max_tokens=1, temperature=0))


async def _finishes(h: HandOver, reason: types_pb2.FinishReason) -> None:
    """A first token with this reason completes the answer."""
    state = await h.first_token(h.any_token, finish_reason=reason)
    expect_equal(state, types_pb2.TRANSFER_STATE_FINISHED, "the state")
    await h.leg.answers([h.any_token])
    expect_equal(h.leg.last.finish_reason, reason, "finish_reason")
