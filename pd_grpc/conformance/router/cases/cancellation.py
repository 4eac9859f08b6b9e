"""R5xx: the client leaves, and the request's time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pd_grpc.conformance.calls import check_fault
from pd_grpc.conformance.case import expect
from pd_grpc.conformance.router.answers import progress, queued
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.routed import Routed
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.protocol.faults import Fault, Reason

ANSWER = [901, 902, 903]
STAGES = {"route", "prepare", "queue", "compute", "transfer", "decode"}
LONG_S = 50.0
SHORT_S = 0.5
"""Enough for both legs to be opened and for the router to answer 100 ms before its end."""
TRIES = 3


@case(501, "cancelling it ends the request everywhere")
async def the_client_leaves_at_once(r: RouterHand) -> None:
    """The client cancels before any token: both legs are cancelled."""
    one = await r.routed()
    one.prefill.send(queued())
    await one.client.leave()
    await one.both_cancelled("the client has left")


@case(502, "cancelling it ends the request everywhere")
async def the_client_leaves_in_mid_answer(r: RouterHand) -> None:
    """The client cancels when D alone has the request: D's leg is cancelled."""
    one = await r.routed()
    one.hand_over()
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    await one.client.leave()
    await one.decode.cancelled("the client has left")


@case(503, "The client's name for the request, up to 128 characters, unique in flight.")
async def a_name_is_free_when_its_client_has_left(r: RouterHand) -> None:
    """The name of a request whose client has left can be used again."""
    name = r.name("n")
    one = await r.routed(request_id=name)
    await one.client.leave()
    await one.both_cancelled("the client has left")
    again = await r.routed(request_id=name)
    await again.finish(ANSWER)


@case(511, "The client's deadline is the request's budget and only shrinks.")
async def the_deadline_passes_on(r: RouterHand) -> None:
    """Both legs have a deadline no later than the client's."""
    one = await r.routed(timeout_s=LONG_S)
    for leg in (one.prefill, one.decode):
        left = leg.time_left
        what = f"a deadline on {leg.instance} of at most {LONG_S:g} s"
        expect(left is not None and LONG_S / 2 < left <= LONG_S, what, left)
    await one.finish(ANSWER)


@case(512, "The call's deadline is the request's budget, without one the server's default")
async def a_default_deadline(r: RouterHand) -> None:
    """A call without a deadline: both legs have one."""
    one = await r.routed(timeout_s=None)
    for leg in (one.prefill, one.decode):
        expect(leg.time_left is not None, f"a deadline on {leg.instance}", leg.time_left)
    await one.finish(ANSWER)


@case(
    513,
    "Each hop answers 100 ms before its budget ends, so that its details reach the caller before "
    "the caller's own timer fires.",
)
async def the_time_ends_before_the_hand_off(r: RouterHand) -> None:
    """The time ends while P computes: the client hears the stage, not its own timer, and both legs
    are over."""

    async def compute(one: Routed) -> None:
        one.prefill.send(queued(), progress(4))

    one, stage = await _spent(r, compute)
    expect(stage in STAGES, f"one of the stages {sorted(STAGES)}", stage)
    for leg in (one.prefill, one.decode):
        await leg.over(f"the leg on {leg.instance} over with the request's time")


@case(514, "A DEADLINE_EXCEEDED with STAGE_DEADLINE names the stage that spent the time")
async def the_time_ends_in_decode(r: RouterHand) -> None:
    """The time ends after the hand-off: the stage is decode."""

    async def decode(one: Routed) -> None:
        one.hand_over()
        one.say(*ANSWER[:2])
        await one.shows(ANSWER[:2])

    one, stage = await _spent(r, decode)
    expect(stage == "decode", "the stage decode", stage)
    await one.decode.over("D's leg over with the request's time")


async def _spent(r: RouterHand, begin: Callable[[Routed], Awaitable[None]]) -> tuple[Routed, str]:
    """A request that is begun and whose time then ends, with the stage that its client is told of.

    A busy machine may hold the answer up for the 100 ms in which it must come, so that the client's
    own timer is the first; a router that keeps to them is in time when tried again.
    """
    for _ in range(TRIES):
        one = await r.routed(timeout_s=SHORT_S)
        await begin(one)
        outcome = await one.client.outcome()
        if isinstance(outcome, Fault):
            break
    fault = check_fault(outcome, Reason.STAGE_DEADLINE, "the request's time is over")
    return one, fault.metadata.get("stage", "")
