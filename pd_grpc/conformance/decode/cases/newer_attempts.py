"""D54x: a newer attempt of a transfer, in every call but Allocate."""

from __future__ import annotations

from dataclasses import replace

from pd_grpc.conformance.calls import check_metadata, refusal
from pd_grpc.conformance.case import expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import types_pb2

EVERYWHERE = (
    "A greater attempt supersedes a smaller one everywhere, even when it comes from another P"
)
OLDER = (
    "An attempt smaller than the greatest that is in flight or remembered is refused with ABORTED, "
    "STALE_ATTEMPT."
)
RECORDED = "for a transfer that has ended it answers the recorded state with OK."
FAILED = types_pb2.TRANSFER_STATE_FAILED


@case(540, EVERYWHERE)
async def a_client_brings_a_newer_attempt(d: DecodeHand) -> None:
    """The client of attempt 2 comes while 1 has a grant: 1 ends for both legs, 2 completes."""
    h = await granted(d)
    newer = _attempt(h.request, 2)
    leg = d.generate(newer)
    fault = await h.leg.fails(Reason.SUPERSEDED, "attempt 2 has come")
    check_metadata(fault, attempt=1, newest=2)
    ended = await h.p.told_of(h.request, "transfer_ended, for attempt 2 has come")
    expect_equal(ended.state, FAILED, "state")
    await HandOver(d, h.p, newer, await h.p.allocate(newer), leg).completes()


@case(541, OLDER)
async def a_client_of_an_older_attempt(d: DecodeHand) -> None:
    """The client of attempt 1 comes while 2 has a grant, and is refused with both numbers."""
    h = await granted(d, d.request(attempt=2))
    leg = d.generate(_attempt(h.request, 1))
    fault = await leg.fails(Reason.STALE_ATTEMPT, "attempt 2 is in flight")
    check_metadata(fault, attempt=1, newest=2)
    await h.completes()


@case(542, OLDER)
async def a_first_token_of_an_older_attempt(d: DecodeHand) -> None:
    """The first token of attempt 1, which D has not seen, is refused while 2 has a grant."""
    h = await granted(d, d.request(attempt=2))
    ref = _attempt(h.request, 1).ref
    fault = await h.first_token_refused(Reason.STALE_ATTEMPT, "attempt 2 is in flight", ref=ref)
    check_metadata(fault, attempt=1, newest=2)
    await h.completes()


@case(543, OLDER)
async def an_older_attempt_is_given_back(d: DecodeHand) -> None:
    """Release of attempt 1, which D has not seen, is refused while 2 has a grant."""
    h = await granted(d, d.request(attempt=2))
    call = h.p.give_back(_attempt(h.request, 1))
    fault = await refusal(call, Reason.STALE_ATTEMPT, "attempt 2 is in flight")
    check_metadata(fault, attempt=1, newest=2)
    await h.completes()


@case(544, RECORDED)
async def a_late_first_token_of_a_superseded_attempt(d: DecodeHand) -> None:
    """Attempt 2 has superseded 1, whose first token comes late: 1 is FAILED, 2 completes."""
    old, new = await _superseded(d)
    expect_equal(await old.first_token(old.any_token), FAILED, "the recorded state of attempt 1")
    await new.completes()


@case(545, f"Idempotent: {RECORDED}")
async def a_superseded_attempt_is_given_back(d: DecodeHand) -> None:
    """Attempt 2 has superseded 1, which is given back late: 1 is FAILED, 2 completes."""
    old, new = await _superseded(d)
    expect_equal(await old.p.release(old.request), FAILED, "the recorded state of attempt 1")
    await new.completes()


@case(
    546,
    "A grant that ends closes its stream with the transfer's own end, such as RELEASED,"
    " CLIENT_GONE, LEASE_EXPIRED, PREFILL_LOST or STAGE_DEADLINE",
)
async def the_stream_of_a_superseded_attempt(d: DecodeHand) -> None:
    """Attempt 2 is asked for while the KV of 1 comes in, whose stream ends with SUPERSEDED."""
    h = await granted(d)
    transfer = await h.receiving()
    newer = _attempt(h.request, 2)
    grant = await h.p.allocate(newer)
    await transfer.refused(Reason.SUPERSEDED, "attempt 2 took over")
    await HandOver(d, h.p, newer, grant, d.generate(newer)).completes()


def _attempt(request: Request, attempt: int) -> Request:
    return replace(request, attempt=attempt)


async def _superseded(d: DecodeHand) -> tuple[HandOver, HandOver]:
    """Attempts 1 and 2 of a transfer, each granted in its turn."""
    old = await granted(d)
    return old, await granted(d, _attempt(old.request, 2), p=old.p)
