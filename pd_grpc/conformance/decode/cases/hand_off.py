"""D44x: from hand-off on the transfer is D's."""

from __future__ import annotations

import asyncio

from pd_grpc.conformance.case import NotApplicable, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import handed_off
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import types_pb2

UNTOUCHED = (
    "After hand-off P's lease, session, epoch and Release no longer touch the transfer; the "
    "client's stream holds it."
)


@case(440, "After hand-off it changes nothing and answers the state.")
async def release_after_hand_off(d: DecodeHand) -> None:
    """P gives back, for a fault, what D owns already; the client who comes gets the answer."""
    h = await handed_off(d)
    state = await h.p.release(h.request, Fault(Reason.ENGINE_ERROR, "too late"))
    expect_equal(state, types_pb2.TRANSFER_STATE_READY, "the state")
    h.client_comes()
    await h.answers()


@case(441, UNTOUCHED)
async def goodbye_after_hand_off(d: DecodeHand) -> None:
    """P leaves after the hand-off; the client who comes gets the answer."""
    h = await handed_off(d)
    await h.p.goodbye()
    await h.p.session.fine("goodbye is answered by the end of the session")
    h.client_comes()
    await h.answers()


@case(442, UNTOUCHED)
async def a_broken_session_after_hand_off(d: DecodeHand) -> None:
    """P is lost after the hand-off and its grace is over; the client who comes gets the answer."""
    wait = 1.2 * d.times.grace
    if d.times.attach <= 1.5 * wait:
        raise NotApplicable("a client is not awaited for longer than grace")
    h = await handed_off(d)
    await h.p.break_session()
    await asyncio.sleep(wait)
    h.client_comes()
    await h.answers()


@case(443, UNTOUCHED)
async def a_newer_process_after_hand_off(d: DecodeHand) -> None:
    """P comes back as a newer process; the client who comes gets the answer."""
    h = await handed_off(d)
    await d.prefill(h.p.instance.name, h.p.instance.epoch + 1)
    h.client_comes()
    await h.answers()


@case(444, UNTOUCHED)
async def a_lease_after_hand_off(d: DecodeHand) -> None:
    """No heartbeat lists the grant for longer than a lease; the client who comes gets the
    answer."""
    wait = 1.1 * d.times.lease
    if d.times.attach <= 1.3 * wait:
        raise NotApplicable("a client is not awaited for longer than a lease")
    h = await handed_off(d, hold=False)
    await asyncio.sleep(wait)
    h.client_comes()
    await h.answers()


@case(445, "A grant that was handed off is known while its transfer lives.")
async def a_heartbeat_after_hand_off(d: DecodeHand) -> None:
    """A heartbeat still lists the grant, and its ack does not call it unknown."""
    h = await handed_off(d)
    ack = await h.p.heartbeat(h.grant.grant_id)
    expect_equal(list(ack.unknown_grant_ids), [], "unknown_grant_ids")
    h.client_comes()
    await h.answers()
