"""D17x: sessions that break, come back or not, and Ps that say goodbye."""

from __future__ import annotations

import asyncio
import time

from pd_grpc.conformance.calls import refusal
from pd_grpc.conformance.case import NotApplicable, answer_s
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.pool import fill, queued, wait_in_queue
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Reason


@case(170, "a new session of the same epoch takes them over.")
async def back_within_grace(d: DecodeHand) -> None:
    """The session breaks and P comes back at once: its grant is good for the whole answer."""
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    grant = await p.allocate(request)
    await p.break_session()
    await d.arrived()
    await p.join()
    await HandOver(d, p, request, grant, leg).completes()


@case(171, "If none comes they fail with PREFILL_LOST.")
async def not_back_within_grace(d: DecodeHand) -> None:
    """The session breaks and P stays away: its client hears PREFILL_LOST."""
    _leases_outlive_grace(d)
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    await p.allocate(request)
    await p.break_session()
    await leg.fails(Reason.PREFILL_LOST, "P did not come back", d.times.grace + answer_s())


@case(
    172,
    "When the stream breaks without goodbye the grants of its P live on for Welcome.grace, or"
    " their leases if those are shorter, and calls in the session's name are still taken",
)
async def calls_while_the_session_is_broken(d: DecodeHand) -> None:
    """The session breaks: for a part of grace the first token is taken again and again."""
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    await p.break_session()
    until = time.monotonic() + 0.3 * d.times.grace
    while time.monotonic() < until:
        await p.first_token(request, grant, 1)
        await asyncio.sleep(0.05 * d.times.grace)
    await p.join()


@case(
    173,
    "When the stream breaks without goodbye the grants of its P live on for Welcome.grace,"
    " or their leases if those are shorter, and calls in the session's name are still taken",
)
async def half_closed_is_broken(d: DecodeHand) -> None:
    """P says no more on its session, without goodbye, and stays away: PREFILL_LOST after grace."""
    _leases_outlive_grace(d)
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    await p.allocate(request)
    await p.session.half_close()
    early = "a grant that lives on for grace"
    await leg.shows_nothing(0.6 * d.times.grace, early)
    await leg.fails(Reason.PREFILL_LOST, "P did not come back", d.times.grace + answer_s())


@case(174, "P leaves on purpose; its transfers not yet handed off fail at once with PREFILL_LOST.")
async def goodbye_ends_transfers(d: DecodeHand) -> None:
    """P says goodbye: the client of its grant hears PREFILL_LOST, and the session is forgotten."""
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    await p.allocate(request)
    await p.goodbye()
    await p.session.outcome()
    # A session that was taken for broken would still be good for calls.
    await p.allocate_refused(d.request(), Reason.NO_SESSION, "Allocate after goodbye")
    await leg.fails(Reason.PREFILL_LOST, "P has left")


@case(175, "OK after a goodbye of either side.")
async def goodbye_ends_the_session(d: DecodeHand) -> None:
    """P says goodbye and reads on: its session ends with OK."""
    p = await d.prefill()
    await p.goodbye()
    await p.session.fine("the session ends after goodbye")


@case(176, "Before hand-off, P lost means PREFILL_LOST.")
async def goodbye_ends_what_waits(d: DecodeHand) -> None:
    """P says goodbye while an Allocate of its waits for blocks: that is refused, the queue left."""
    holder, p = await d.prefill(), await d.prefill()
    await fill(d, holder)
    call = await wait_in_queue(p, d.request(), 0)
    await p.goodbye()
    await refusal(call, Reason.PREFILL_LOST, "an Allocate of a P that has left")
    await queued(holder, 0)


@case(177, "After hand-off P's lease, session, epoch and Release no longer touch the transfer")
async def goodbye_spares_what_was_handed_off(d: DecodeHand) -> None:
    """P says goodbye after the hand-off: a client that comes then gets the whole answer."""
    p = await d.prefill()
    request = d.request()
    grant = await p.hand_over(request, d.first_token(request))
    await p.goodbye()
    await p.session.fine("the session ends after goodbye")
    await HandOver(d, p, request, grant, d.generate(request)).answers()


def _leases_outlive_grace(d: DecodeHand) -> None:
    if d.times.lease < 1.5 * d.times.grace:
        raise NotApplicable("a lease may end before grace does")
