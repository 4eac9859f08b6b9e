"""D15x: processes and sessions of one P that take over from each other."""

from __future__ import annotations

import asyncio

from pd_grpc.conformance.calls import check_metadata, refusal
from pd_grpc.conformance.case import expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.prefill import KitPrefill
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import decode_pb2, types_pb2


@case(
    150,
    "Of two instances of one name the greater epoch supersedes: the smaller is refused with"
    " FAILED_PRECONDITION, STALE_EPOCH, and a process so refused turns NOT_SERVING and"
    " drains.",
)
async def a_smaller_epoch(d: DecodeHand) -> None:
    """P with a smaller epoch than one that has a session is refused with both epochs."""
    p = await d.prefill()
    name, epoch = p.instance.name, p.instance.epoch
    older = d.new_prefill(name, epoch - 1)
    fault = await older.refused(Reason.STALE_EPOCH, "a smaller epoch")
    check_metadata(fault, epoch=epoch - 1, newest=epoch)
    await p.heartbeat()


@case(
    151,
    "FAILED_PRECONDITION with LAYOUT_MISMATCH, the field and both values, when layout,"
    " transport, shards or hash algorithm do not fit, with STALE_EPOCH when a newer process"
    " of P has been seen, with WRONG_INSTANCE",
)
async def a_smaller_epoch_once_the_greater_has_left(d: DecodeHand) -> None:
    """P with a smaller epoch than one that has said goodbye is refused."""
    p = await d.prefill()
    await p.goodbye()
    await p.session.fine("goodbye is answered by the end of the session")
    older = d.new_prefill(p.instance.name, p.instance.epoch - 1)
    await older.refused(Reason.STALE_EPOCH, "a smaller epoch than one that was here")


@case(
    152,
    "A greater epoch of P's name ends the transfers of the smaller that are not handed off, with"
    " PREFILL_LOST.",
)
async def a_greater_epoch_ends_transfers(d: DecodeHand) -> None:
    """P comes back as a new process: the client of a grant of the old one hears PREFILL_LOST."""
    p = await d.prefill(beats=False)
    request = d.request()
    leg = d.generate(request)
    await p.allocate(request)
    await d.prefill(p.instance.name, p.instance.epoch + 1)
    await leg.fails(Reason.PREFILL_LOST, "the process that held the grant was replaced")


@case(153, "ABORTED with SUPERSEDED when a newer session of this P began")
async def a_greater_epoch_ends_the_session(d: DecodeHand) -> None:
    """P comes back as a new process: the session of the old one ends."""
    p = await d.prefill(beats=False)
    await d.prefill(p.instance.name, p.instance.epoch + 1)
    await p.session.refused(Reason.SUPERSEDED, "a newer process has a session")


@case(154, "a newer attempt, session or stream took over")
async def a_second_session_ends_the_first(d: DecodeHand) -> None:
    """P opens a second session: the first one ends, the second goes on."""
    p = await d.prefill()
    first = p.session
    await p.join()
    await first.refused(Reason.SUPERSEDED, "a newer session of the same process")
    await p.heartbeat()


@case(
    155,
    "A call whose session_id is unknown or superseded is FAILED_PRECONDITION with NO_SESSION.",
)
async def calls_in_the_name_of_another_session(d: DecodeHand) -> None:
    """Allocate, SendFirstToken and Release with a superseded session_id and with one made up."""
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    superseded = p.welcome.session_id
    await p.join()
    for session_id in (superseded, "kit-made-this-up", ""):
        await p.allocate_refused(d.request(), Reason.NO_SESSION, "Allocate", session_id=session_id)
        first = p.first_token_message(request, grant, 1)
        first.session_id = session_id
        await refusal(p.send_first(first), Reason.NO_SESSION, "SendFirstToken")
        release = p.give_back(request, session_id=session_id)
        await refusal(release, Reason.NO_SESSION, "Release")
    await _still_granted(p, request, grant)


@case(
    156,
    "FAILED_PRECONDITION with NO_SESSION when session_id is unknown or long superseded (the"
    " one before the newest is still taken, for a stream may cross with a new session), with"
    " STALE_EPOCH when the ref means another process of D",
)
async def a_transfer_that_crosses_with_a_new_session(d: DecodeHand) -> None:
    """Transfer with the session_id before the newest is taken; one session earlier it is not."""
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    oldest = p.welcome.session_id
    before = (await p.join()).session_id
    await p.join()
    crossed = await p.open(request, grant, session_id=before)
    await crossed.opened()
    late = await p.open(request, grant, session_id=oldest)
    await late.refused(Reason.NO_SESSION, "a Transfer in a session long superseded")
    await _still_granted(p, request, grant)


@case(157, "The newest session of an epoch owns all its grants and renews them when it begins")
async def grants_go_over_to_the_new_session(d: DecodeHand) -> None:
    """A grant of the first session is used in the name of the second, to the whole answer."""
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    grant = await p.allocate(request)
    await p.join()
    await HandOver(d, p, request, grant, leg).completes()


@case(158, "The newest session of an epoch owns all its grants and renews them when it begins")
async def a_new_session_renews(d: DecodeHand) -> None:
    """A grant that no heartbeat lists outlives its lease where a new session has begun in it."""
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request, hold=False)
    await asyncio.sleep(0.6 * d.times.lease)
    await p.join()
    await asyncio.sleep(0.6 * d.times.lease)
    await _still_granted(p, request, grant)


@case(159, "the end of an older one is a no-op.")
async def the_end_of_the_older_session(d: DecodeHand) -> None:
    """The first of two sessions ends, and once grace is over the grants of its P still live."""
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    first = p.session
    await p.join()
    await first.leave()
    await asyncio.sleep(1.2 * d.times.grace)
    await _still_granted(p, request, grant)
    await p.heartbeat()


@case(160, "a call of P's for another's transfer is PERMISSION_DENIED with NOT_OWNER.")
async def a_transfer_of_another(d: DecodeHand) -> None:
    """Allocate, SendFirstToken and Release of another P's transfer are refused; it is unharmed."""
    p, other = await d.prefill(), await d.prefill()
    request = d.request()
    leg = d.generate(request)
    grant = await p.allocate(request)
    await other.allocate_refused(request, Reason.NOT_OWNER, "Allocate of another's transfer")
    first = other.first_token_message(request, grant, d.first_token(request))
    await refusal(other.send_first(first), Reason.NOT_OWNER, "SendFirstToken of another's")
    await refusal(other.give_back(request), Reason.NOT_OWNER, "Release of another's transfer")
    await HandOver(d, p, request, grant, leg).completes()


async def _still_granted(
    p: KitPrefill, request: Request, grant: decode_pb2.AllocateResponse
) -> None:
    """Broken unless the transfer lives: a heartbeat knows its grant, and it can be given back."""
    ack = await p.heartbeat(grant.grant_id)
    expect_equal(list(ack.unknown_grant_ids), [], "unknown_grant_ids")
    expect_equal(await p.release(request), types_pb2.TRANSFER_STATE_RELEASED, "state")
