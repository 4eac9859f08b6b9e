"""D23x: attempts that take over from each other in Allocate."""

from __future__ import annotations

from pd_grpc.conformance.calls import check_fault, check_metadata, refusal
from pd_grpc.conformance.case import expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.pool import fill, free, granted, wait_in_queue
from pd_grpc.conformance.decode.prefill import KitPrefill
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.protocol.faults import Fault, Reason, read_status


@case(230, "the smaller one, if it has not ended, ends with ABORTED, SUPERSEDED.")
async def a_greater_attempt(d: DecodeHand) -> None:
    """P asks for attempt 2: client and P of attempt 1 hear of it, and its blocks are free."""
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    await p.allocate(request)
    one = (await p.load_now()).free_blocks
    newer = _attempt(request, 2)
    grant = await p.allocate(newer)
    _superseded(await leg.fails(Reason.SUPERSEDED, "attempt 1"))
    await _told(p, request)
    await free(p, one)
    second = d.generate(newer)
    await HandOver(d, p, newer, grant, second).completes()


@case(
    231,
    "A greater attempt supersedes a smaller one everywhere, even when it comes from another P",
)
async def a_greater_attempt_of_another_prefill(d: DecodeHand) -> None:
    """Another P asks for attempt 2: it is granted, and the P of attempt 1 is told."""
    p, other = await d.prefill(), await d.prefill()
    request = d.request()
    await p.allocate(request)
    await other.allocate(_attempt(request, 2))
    await _told(p, request)


@case(
    232,
    "An attempt smaller than the greatest that is in flight or remembered is refused with"
    " ABORTED, STALE_ATTEMPT.",
)
async def a_smaller_attempt(d: DecodeHand) -> None:
    """Attempt 2 is refused while 3 is in flight, with both numbers; 3 is unharmed."""
    p = await d.prefill()
    newest = d.request(attempt=3)
    grant = await p.allocate(newest)
    for number in (1, 2):
        older = _attempt(newest, number)
        fault = await p.allocate_refused(older, Reason.STALE_ATTEMPT, f"attempt {number}")
        check_metadata(fault, attempt=number, newest=3)
    expect_equal(await p.allocate(newest), grant, "the grant of attempt 3")


@case(
    233,
    "An attempt smaller than the greatest that is in flight or remembered is refused with"
    " ABORTED, STALE_ATTEMPT.",
)
async def a_smaller_attempt_than_one_remembered(d: DecodeHand) -> None:
    """Attempt 1 is refused once 2 has ended; attempt 3 is granted."""
    p = await d.prefill()
    newest = d.request(attempt=2)
    await p.allocate(newest)
    await p.release(newest)
    fault = await p.allocate_refused(_attempt(newest, 1), Reason.STALE_ATTEMPT, "attempt 1")
    check_metadata(fault, attempt=1, newest=2)
    await p.allocate(_attempt(newest, 3))


@case(
    234, "A greater attempt supersedes a smaller one everywhere, even when it comes from another P"
)
async def a_greater_attempt_of_one_that_waits(d: DecodeHand) -> None:
    """P asks for attempt 2 while 1 waits for blocks: 1 is refused, 2 gets the blocks."""
    p = await d.prefill()
    holders = await fill(d, p)
    request = d.request()
    waiting = await wait_in_queue(p, request, 0)
    newer = p.ask(_attempt(request, 2))
    _superseded(await refusal(waiting, Reason.SUPERSEDED, "the Allocate of attempt 1"))
    for holder in holders:
        await p.release(holder)
    await granted(p, newer, "the grant of attempt 2")


def _attempt(request: Request, number: int) -> Request:
    """The same transfer, another attempt."""
    return Request(**{**vars(request), "attempt": number})


def _superseded(fault: Fault) -> None:
    check_metadata(fault, attempt=1, newest=2)


async def _told(p: KitPrefill, request: Request) -> None:
    """Broken unless P hears that attempt 2 has taken over."""
    ended = await p.told_of(request, "the end of attempt 1")
    _superseded(check_fault(read_status(ended.status), Reason.SUPERSEDED, "attempt 1"))
