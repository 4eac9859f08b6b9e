"""R40x: what the client hears when an instance fails."""

from __future__ import annotations

import grpc

from pd_grpc.conformance.case import broken, expect, expect_equal
from pd_grpc.conformance.router.answers import handed_off
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.protocol.faults import STATUS_TABLE, Code, Fault, Quota, Reason, Retry
from pd_grpc.v1 import types_pb2

ANSWER = [901, 902, 903]

NOT_FROM_INSTANCES = {
    Reason.DUPLICATE_REQUEST,
    Reason.NO_INSTANCE,
    Reason.CREDENTIALS,
    Reason.ROLE,
    Reason.NOT_OWNER,
}
CONSEQUENCES = {Reason.CLIENT_GONE, Reason.RELEASED, Reason.SUPERSEDED}
"""What an instance says when something else has ended the request: the router looks for that."""
MISTAKEN = {Reason.STALE_EPOCH, Reason.WRONG_INSTANCE}
"""After these the router asks who is there; see the losses."""
PASSED_ON = [r for r in Reason if r not in NOT_FROM_INSTANCES | CONSEQUENCES | MISTAKEN]


@case(401, "A failure carries the code that the status table lets a client see, and its reason.")
async def each_failure_of_prefill(r: RouterHand) -> None:
    """P fails for each reason of the status table: the client hears the reason, with the code meant
    for it, and D's leg is cancelled."""
    for reason in PASSED_ON:
        one = await r.routed()
        one.prefill.fail(Fault(reason, "as the case has it", {"stage": "compute"}))
        await r.fails(one.client, reason, f"P failed with {reason.value}")
        await one.decode.cancelled(f"P failed with {reason.value}")
        if STATUS_TABLE[reason].retry is Retry.OTHER:
            # A router may have left P alone for a moment.
            await r.subject.routes_to(r.d)


@case(402, "A failure carries the code that the status table lets a client see, and its reason.")
async def each_failure_of_decode(r: RouterHand) -> None:
    """D fails for each reason of the status table: the client hears the reason, with the code meant
    for it, and P's leg is cancelled."""
    for reason in PASSED_ON:
        one = await r.routed()
        one.decode.fail(Fault(reason, "as the case has it", {"stage": "allocate"}))
        await r.fails(one.client, reason, f"D failed with {reason.value}")
        await one.prefill.cancelled(f"D failed with {reason.value}")
        if STATUS_TABLE[reason].retry is Retry.OTHER:
            await r.subject.routes_to(r.d)


@case(
    403,
    "NO_BLOCKS, and QUEUE_FULL of D, come with RetryInfo and QuotaFailure, whose numbers the "
    "metadata has as blocks_needed and blocks_free.",
)
async def details_pass(r: RouterHand) -> None:
    """A refusal's details reach the client."""
    one = await r.routed()
    quota = Quota(needed=7, free=2)
    one.prefill.fail(Fault(Reason.NO_BLOCKS, "full", retry_after_s=0.25, quota=quota))
    fault = await r.fails(one.client, Reason.NO_BLOCKS, "D has no blocks")
    expect_equal(fault.retry_after_s, 0.25, "the delay of RetryInfo, in seconds,")
    expect_equal(fault.quota, quota, "QuotaFailure")


@case(404, "A failure of one leg before the hand-off cancels the other.")
async def decode_fails_while_prefill_computes(r: RouterHand) -> None:
    """D fails after P has begun: P is told by the cancelled call."""
    one = await r.routed()
    one.decode.fail(Fault(Reason.ENGINE_ERROR, "boom"))
    await one.prefill.cancelled("D has failed")
    await r.fails(one.client, Reason.ENGINE_ERROR, "D has failed")


@case(405, "Tokens that came before a failure are given to the client before it.")
async def tokens_come_before_a_failure(r: RouterHand) -> None:
    """D sends tokens and fails in the same breath: the client has them all, then the failure."""
    one = await r.routed()
    one.hand_over()
    one.say(*ANSWER[:2])
    one.say(*ANSWER[2:])
    one.decode.fail(Fault(Reason.ENGINE_ERROR, "boom"))
    await r.fails(one.client, Reason.ENGINE_ERROR, "D has failed")
    expect_equal(one.client.tokens, ANSWER, "the tokens before the failure")


@case(406, "What happens to P after handed_off changes nothing.")
async def prefill_fails_after_the_hand_off(r: RouterHand) -> None:
    """P hands over and then fails: the answer goes on to its end."""
    one = await r.routed()
    one.prefill.send(handed_off(r.d, len(one.prompt)))
    one.prefill.fail(Fault(Reason.ENGINE_ERROR, "boom"))
    one.say(ANSWER[0])
    await one.shows(ANSWER[:1])
    await one.prefill.over("P's leg over")
    one.say(ANSWER[1])
    await one.shows(ANSWER[:2])
    one.say_last(*ANSWER[2:])
    await one.answers(ANSWER)


@case(407, "an answer without it is not complete")
async def an_answer_without_its_end(r: RouterHand) -> None:
    """D ends its answer with OK and without a finish_reason: the client is told of a failure."""
    one = await r.routed()
    one.hand_over()
    one.say(*ANSWER)
    one.decode.end()
    if await one.client.outcome() is None:
        broken("a failure, for the answer is not complete", one.client.last)
    named = [m for m in one.client.messages if m.finish_reason]
    expect(not named, "no finish_reason", named)


@case(408, "UNAVAILABLE then means that the peer is lost, and no other is retried.")
async def a_status_of_the_transports(r: RouterHand) -> None:
    """A bare RESOURCE_EXHAUSTED, which is a message too large, is not told as a lack of blocks or
    anything that another try helps against."""
    one = await r.routed()
    one.prefill.fail_bare(grpc.StatusCode.RESOURCE_EXHAUSTED)
    fault = await one.client.outcome()
    expect(fault is not None, "a failure", fault)
    if isinstance(fault, Fault):
        expect(fault.retry is Retry.NEVER, "a reason that nobody retries", fault)
    r.instances.expect_no_call("the status is not one to retry")


@case(
    409,
    "A reason that the reader does not know is read by its code, as a status of the transport's.",
)
async def a_reason_of_a_later_version(r: RouterHand) -> None:
    """D fails in mid-answer with UNAVAILABLE and a reason of a later version: D is lost."""
    one = await r.routed()
    one.hand_over()
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    one.decode.fail_for("REASON_OF_A_LATER_VERSION", Code.UNAVAILABLE)
    await r.fails(one.client, Reason.DECODE_LOST, "D is lost")


@case(410, "Set on the last message, and only there")
async def a_finished_answer_stays_finished(r: RouterHand) -> None:
    """P fails after D's last message: the answer is complete all the same."""
    one = await r.routed()
    one.say(ANSWER[0])
    await one.shows(ANSWER[:1])
    one.say_last(*ANSWER[1:], reason=types_pb2.FINISH_REASON_STOP)
    await one.decode.over("D's leg over")
    one.prefill.fail(Fault(Reason.ENGINE_ERROR, "boom"))
    await one.answers(ANSWER)
