"""R5xx: the client leaves, and the request's time."""

from __future__ import annotations

from pd_grpc.conformance.calls import check_fault
from pd_grpc.conformance.case import expect
from pd_grpc.conformance.router.answers import progress, queued
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.routed import Routed
from pd_grpc.conformance.router.subject import Router
from pd_grpc.protocol.faults import Reason

ANSWER = [901, 902, 903]
STAGES = {"route", "prepare", "queue", "compute", "transfer", "decode"}
LONG_S = 50.0
SHORT_S = 0.6
"""Enough for both legs to be opened and for the router to answer 100 ms before its end."""


@case(501, "cancelling it ends the request everywhere")
async def the_client_leaves_at_once(r: Router) -> None:
    """The client cancels before any token: both legs are cancelled."""
    one = await r.routed()
    one.prefill.send(queued())
    await one.client.leave()
    await one.both_cancelled("the client has left")


@case(502, "cancelling it ends the request everywhere")
async def the_client_leaves_in_mid_answer(r: Router) -> None:
    """The client cancels when D alone has the request: D's leg is cancelled."""
    one = await r.routed()
    one.hand_over()
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    await one.client.leave()
    await one.decode.cancelled("the client has left")


@case(503, "unique in flight")
async def a_name_is_free_when_its_client_has_left(r: Router) -> None:
    """The name of a request whose client has left can be used again."""
    name = r.name("n")
    one = await r.routed(request_id=name)
    await one.client.leave()
    await one.both_cancelled("the client has left")
    again = await r.routed(request_id=name)
    await again.finish(ANSWER)


@case(511, "The client's deadline is the request's budget and only shrinks.")
async def the_deadline_passes_on(r: Router) -> None:
    """Both legs have a deadline no later than the client's."""
    one = await r.routed(timeout_s=LONG_S)
    for leg in (one.prefill, one.decode):
        left = leg.time_left
        what = f"a deadline on {leg.instance} of at most {LONG_S:g} s"
        expect(left is not None and LONG_S / 2 < left <= LONG_S, what, left)
    await one.finish(ANSWER)


@case(512, "The call's deadline is the request's budget, without one the server's default")
async def a_default_deadline(r: Router) -> None:
    """A call without a deadline: both legs have one."""
    one = await r.routed(timeout_s=None)
    for leg in (one.prefill, one.decode):
        expect(leg.time_left is not None, f"a deadline on {leg.instance}", leg.time_left)
    await one.finish(ANSWER)


@case(
    513,
    "Each hop answers 100 ms before its budget ends, so that its details reach the caller "
    "before the caller's own timer fires.",
)
async def the_time_ends_before_the_hand_off(r: Router) -> None:
    """The time ends while P computes: the client hears the stage, not its own timer, and both legs
    are over."""
    one = await r.routed(timeout_s=SHORT_S)
    one.prefill.send(queued(), progress(4))
    stage = await _spent_in(one)
    expect(stage in STAGES, f"one of the stages {sorted(STAGES)}", stage)
    for leg in (one.prefill, one.decode):
        await leg.over(f"the leg on {leg.instance} over with the request's time")


@case(514, "A DEADLINE_EXCEEDED with STAGE_DEADLINE names the stage that spent the time")
async def the_time_ends_in_decode(r: Router) -> None:
    """The time ends after the hand-off: the stage is decode."""
    one = await r.routed(timeout_s=SHORT_S)
    one.hand_over()
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    stage = await _spent_in(one)
    expect(stage == "decode", "the stage decode", stage)
    await one.decode.over("D's leg over with the request's time")


async def _spent_in(one: Routed) -> str:
    """The stage that the client is told of."""
    fault = await one.client.outcome()
    fault = check_fault(fault, Reason.STAGE_DEADLINE, "the request's time is over")
    return fault.metadata.get("stage", "")
