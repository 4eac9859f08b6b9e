"""R43x: a router that tries a request elsewhere. One that does not is not judged by these."""

from __future__ import annotations

from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.instance import KitInstance
from pd_grpc.conformance.router.routed import Routed
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.protocol.faults import Fault, Reason

ANSWER = [901, 902, 903, 904]


@case(431, "The new attempt has the same transfer_id and a greater attempt.")
async def a_new_attempt_of_the_same_transfer(r: RouterHand) -> None:
    """D refuses its leg, and P turns to nobody: a router that begins anew at the other D does so
    under the same transfer_id, with a greater attempt on both legs."""
    other, one = await _with_an_alternate(r)
    one.decode.fail(Fault(Reason.DRAINING, "this D leaves"))
    again = await r.elsewhere(one.client)
    _expect_next_attempt(one, again, other)
    for leg in (again.prefill, again.decode):
        seen = list(leg.request.generated_token_ids)
        expect_equal(seen, [], f"generated_token_ids on {leg.instance}, where nothing came,")
    await again.finish(ANSWER)


@case(
    432,
    "Tokens that the client has go along as generated_token_ids, and the answer goes on behind"
    " them.",
)
async def an_answer_goes_on(r: RouterHand) -> None:
    """D's connection is lost after two tokens: a router that goes on at the other D tells both legs
    of the two, and the client reads the rest behind them, each token once."""
    other, one = await _with_an_alternate(r)
    one.hand_over()
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    await r.instances.cut(_called(r, one))
    again = await r.elsewhere(one.client)
    _expect_next_attempt(one, again, other)
    for leg in (again.prefill, again.decode):
        seen = list(leg.request.generated_token_ids)
        expect_equal(seen, ANSWER[:2], f"generated_token_ids on {leg.instance}")
        expect_equal(leg.request.sampling, one.decode.request.sampling, "the sampling")
    again.hand_over()
    again.say(*ANSWER[2:3])
    again.say_last(*ANSWER[3:])
    await again.answers(ANSWER)


@case(433, "The legs of the attempt before are cancelled.")
async def the_attempt_before_is_cancelled(r: RouterHand) -> None:
    """D's connection is lost before a token, and P turns to nobody: where the router begins anew,
    P's old leg is cancelled."""
    _, one = await _with_an_alternate(r)
    await r.instances.cut(_called(r, one))
    again = await r.elsewhere(one.client)
    await one.prefill.cancelled("the request has begun anew")
    await again.finish(ANSWER)


async def _with_an_alternate(r: RouterHand) -> tuple[KitInstance, Routed]:
    """A request while two Ds are ready, with the D that does not have it."""
    other = await r.offers_alternate()
    one = await r.routed()
    return (other if one.decode.instance == r.d.name else r.d), one


def _called(r: RouterHand, one: Routed) -> KitInstance:
    return next(each for each in r.instances.all if each.name == one.decode.instance)


def _expect_next_attempt(one: Routed, again: Routed, other: KitInstance) -> None:
    expect_equal(again.decode.instance, other.name, "the D of the new attempt")
    p, d = again.ref, again.decode.request.handoff.ref
    expect_equal(p.transfer_id, one.ref.transfer_id, "the transfer_id of Prefill")
    expect_equal(d.transfer_id, one.ref.transfer_id, "the transfer_id of Generate")
    expect_equal(d.attempt, p.attempt, "the attempt of Generate, as Prefill's,")
    expect(p.attempt > one.ref.attempt, f"an attempt above {one.ref.attempt}", p)
