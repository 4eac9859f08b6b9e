"""D24x: the queue for blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from pd_grpc.conformance.calls import check_fault, check_metadata, refusal, refusal_details
from pd_grpc.conformance.case import (
    NotApplicable,
    answer_s,
    eventually,
    expect,
    expect_equal,
    soon_s,
    within,
)
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.pool import (
    expect_waiting,
    fill,
    free,
    granted,
    queued,
    request_of,
    wait_in_queue,
)
from pd_grpc.conformance.decode.prefill import KitPrefill
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.protocol.faults import Fault, Reason, TransportFault
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.rpc import read_error
from pd_grpc.v1 import decode_pb2

TRIES = 3
"""Calls of which one must be answered in its last 100 ms; a busy machine may be late for some."""

ASKED_AT_ONCE = 48
"""Allocates sent before D is asked again how many wait."""

MOST_ASKED = 4096
"""Allocates sent to a D before its queue is taken for boundless."""


@case(240, "How long to wait for blocks; 0 or unset means not at all.")
async def no_wait(d: DecodeHand) -> None:
    """The pool is full: an Allocate with max_wait 0, and one without, is refused at once."""
    p = await d.prefill()
    await fill(d, p)
    for max_wait in (duration(0), None):
        await p.allocate_refused(d.request(), Reason.NO_BLOCKS, "no wait", max_wait=max_wait)


@case(
    241,
    "NO_BLOCKS, and QUEUE_FULL of D, come with RetryInfo and QuotaFailure, whose numbers the "
    "metadata has as blocks_needed and blocks_free.",
)
async def no_blocks_has_details(d: DecodeHand) -> None:
    """The refusal of an Allocate that does not wait says when to try again, and what is short."""
    p = await d.prefill()
    await fill(d, p)
    await _with_details(p.ask(d.request(), max_wait=None), Reason.NO_BLOCKS)


@case(
    242,
    "RESOURCE_EXHAUSTED with NO_BLOCKS after max_wait, which D cuts to 100 ms before the"
    " call's own deadline, or with QUEUE_FULL at once",
)
async def the_wait_is_over(d: DecodeHand) -> None:
    """The pool stays full: an Allocate is refused after its max_wait and not before."""
    p = await d.prefill()
    await fill(d, p)
    began, wait = time.monotonic(), soon_s()
    request = d.request()
    await refusal(p.ask(request, max_wait=duration(wait)), Reason.NO_BLOCKS, "the wait is over")
    took = time.monotonic() - began
    expect(took >= wait, f"a refusal after {wait:g} s", f"one after {took:.3f} s")
    await queued(p, 0)


@case(
    243,
    "RESOURCE_EXHAUSTED with NO_BLOCKS after max_wait, which D cuts to 100 ms before the"
    " call's own deadline, or with QUEUE_FULL at once",
)
async def the_call_ends_before_the_wait(d: DecodeHand) -> None:
    """The call's own deadline is before the end of max_wait: NO_BLOCKS comes before it."""
    p = await d.prefill()
    await fill(d, p)
    fault: Fault | TransportFault | None = None
    for _ in range(TRIES):
        call = p.ask(d.request(), timeout_s=soon_s(), max_wait=duration(30))
        try:
            await within(None, call, "the end of a call that has a deadline")
        except grpc.RpcError as error:
            fault = read_error(error)
        if isinstance(fault, Fault):
            break
    check_fault(fault, Reason.NO_BLOCKS, "an answer before the caller's own timer")


@case(244, "Waits up to max_wait, first in and first out")
async def first_in_first_out(d: DecodeHand) -> None:
    """Three wait for two blocks each; as two come back, and two again, they are served in order."""
    d.needs_blocks(6)
    p = await d.prefill()
    holders = (await fill(d, p, 2, 2, 2))[:3]
    waiting: list[Any] = []
    for n in range(len(holders)):
        waiting.append(await wait_in_queue(p, request_of(d, 2), n))
    for n, holder in enumerate(holders):
        await p.release(holder)
        await granted(p, waiting[n], f"the grant of number {n + 1} of three")
        for later in waiting[n + 1 :]:
            expect_waiting(later, f"a wait behind number {n + 1} of three")


@case(
    245,
    "while the request at the head waits for blocks no later one overtakes it, so that a large"
    " one is not starved.",
)
async def a_small_one_behind_a_large_one(d: DecodeHand) -> None:
    """A large Allocate waits, a small one behind it that would fit: neither is granted."""
    d.needs_blocks(4)
    p = await d.prefill()
    small_holder, large_holder = (await fill(d, p, 1, 3))[:2]
    large = await wait_in_queue(p, request_of(d, 4), 0)
    small = await wait_in_queue(p, request_of(d, 1), 1)
    await p.release(small_holder)
    load = await free(p, 1)
    expect_equal(load.queued_requests, 2, "queued_requests, with one block free,")
    expect_waiting(small, "the small one behind the large one")
    await p.release(large_holder)
    grant = await granted(p, large, "the grant of the large one")
    expect_waiting(small, f"the small one, for no block is left beside {grant.grant_id}")
    small.cancel()


@case(
    246,
    "while the request at the head waits for blocks no later one overtakes it, so that a large"
    " one is not starved.",
)
async def a_newcomer_that_would_fit(d: DecodeHand) -> None:
    """A large Allocate waits while a block is free: one that asks for a block now is refused."""
    d.needs_blocks(2)
    p = await d.prefill()
    await fill(d, p, leave=1)
    large = await wait_in_queue(p, request_of(d, 2), 0)
    newcomer = p.ask(request_of(d, 1), max_wait=None)
    await refusal(newcomer, Reason.NO_BLOCKS, "a block that another waits for")
    expect_waiting(large, "the large one, for its blocks")
    large.cancel()


@case(
    247,
    "the same body without session_id, max_wait and budget gets the same answer, and"
    " repeated calls wait together, each for its own max_wait.",
)
async def repeated_calls_wait_together(d: DecodeHand) -> None:
    """Three calls for one ref wait; the one that waits for less is refused, the others granted."""
    p = await d.prefill()
    holders = await fill(d, p)
    request = d.request()
    first = await wait_in_queue(p, request, 0)
    second = p.ask(request)
    short = p.ask(request, max_wait=duration(soon_s() / 2))
    await refusal(short, Reason.NO_BLOCKS, "the call that waits for less")
    for call in (first, second):
        expect_waiting(call, "the calls that wait for longer")
    await _release(p, holders)
    grants = [await granted(p, call, "the grant of both calls") for call in (first, second)]
    expect_equal(grants[1], grants[0], "the answer to the second call, as to the first,")


@case(248, "The queue is left at once when the last of them is cancelled or ends.")
async def one_of_two_callers_leaves(d: DecodeHand) -> None:
    """Two calls for one ref wait, the first is cancelled: the other is granted."""
    p = await d.prefill()
    holders = await fill(d, p)
    request = d.request()
    first = await wait_in_queue(p, request, 0)
    second = p.ask(request)
    # Refused at once, and so the one before it has come.
    await refusal(p.ask(request, max_wait=None), Reason.NO_BLOCKS, "a call that does not wait")
    first.cancel()
    await queued(p, 1)
    await _release(p, holders)
    await granted(p, second, "the grant of the call that was not cancelled")


@case(249, "The queue is left at once when the last of them is cancelled or ends.")
async def every_caller_leaves(d: DecodeHand) -> None:
    """All calls for a ref are cancelled: nothing waits, and the ref may be asked for again."""
    p = await d.prefill()
    holders = await fill(d, p)
    request = d.request()
    calls = [await wait_in_queue(p, request, 0), p.ask(request)]
    for call in calls:
        call.cancel()
    await queued(p, 0)
    await _release(p, holders)
    await p.allocate(request)


@case(
    250,
    "An Allocate that was refused, or that nobody waits for any more, has granted nothing:"
    " it leaves no tombstone and P may ask again with the same ref, except where the refusal"
    " was the transfer's own end, as with HANDOFF_MISMATCH.",
)
async def asking_again_after_a_refusal(d: DecodeHand) -> None:
    """An Allocate finds no blocks while its client waits; asked again, it has its answer."""
    p = await d.prefill()
    holders = await fill(d, p)
    request = d.request()
    leg = d.generate(request)
    await p.allocate_refused(request, Reason.NO_BLOCKS, "no wait", max_wait=None)
    short = p.ask(request, max_wait=duration(soon_s() / 2))
    await refusal(short, Reason.NO_BLOCKS, "the wait is over")
    await _release(p, holders)
    grant = await p.hand_over(request, d.first_token(request))
    await HandOver(d, p, request, grant, leg).answers()


@case(251, 'DEADLINE_EXCEEDED with STAGE_DEADLINE and the stage "allocate" when the budget is over')
async def the_budget_is_over(d: DecodeHand) -> None:
    """An Allocate waits for longer than its budget: it is refused when that is over."""
    p = await d.prefill()
    await fill(d, p)
    call = p.ask(d.request(), budget=duration(soon_s()))
    fault = await refusal(call, Reason.STAGE_DEADLINE, "the budget is over")
    check_metadata(fault, stage="allocate")
    await queued(p, 0)


@case(252, "A repeated call only shortens it.")
async def a_budget_is_not_lengthened(d: DecodeHand) -> None:
    """An Allocate that waits is repeated with a greater budget: both end with the first one."""
    p = await d.prefill()
    await fill(d, p)
    request = d.request()
    first = p.ask(request, budget=duration(soon_s()))
    second = p.ask(request, budget=duration(60))
    for call in (first, second):
        await refusal(call, Reason.STAGE_DEADLINE, "the budget of the first call")


@case(
    253,
    "RESOURCE_EXHAUSTED with NO_BLOCKS after max_wait, which D cuts to 100 ms before the"
    " call's own deadline, or with QUEUE_FULL at once",
)
async def the_queue_is_full(d: DecodeHand) -> None:
    """Allocates are sent until one is refused, with all details, while the others wait on."""
    p = await d.prefill()
    await fill(d, p)
    calls: list[Any] = []

    def seen(load: decode_pb2.Load) -> bool:
        """Each call waits, or some are refused."""
        return load.queued_requests >= len(calls) or any(call.done() for call in calls)

    while not (refused := [call for call in calls if call.done()]):
        if len(calls) >= MOST_ASKED:
            raise NotApplicable(f"{MOST_ASKED} Allocates may wait, or more")
        calls += [p.ask(d.request()) for _ in range(ASKED_AT_ONCE)]
        load = await eventually(lambda: p.load_now(), seen, "every Allocate waiting or refused")
    expect(load.queued_requests >= 1, "those that came before waiting on", load)
    for call in refused:
        await _with_details(call, Reason.QUEUE_FULL)
    for call in calls:
        call.cancel()
    await queued(p, 0)


@case(254, "Counts from the grant, however late the answer.")
async def a_grant_that_was_waited_for(d: DecodeHand) -> None:
    """An Allocate waits for most of a lease: its grant then has a whole one."""
    p = await d.prefill()
    holders = await fill(d, p)
    request = d.request()
    call = await wait_in_queue(p, request, 0)
    await asyncio.sleep(0.6 * d.times.lease)
    await _release(p, holders)
    grant = await granted(p, call, "the grant")
    p.held.discard(grant.grant_id)
    await asyncio.sleep(0.6 * d.times.lease)
    ack = await p.heartbeat(grant.grant_id)
    expect_equal(list(ack.unknown_grant_ids), [], "unknown_grant_ids")


async def _release(p: KitPrefill, holders: list[Request]) -> None:
    for holder in holders:
        await p.release(holder)


async def _with_details(call: Awaitable[object], reason: Reason) -> None:
    """Broken unless an Allocate is refused, with the details of one that found no room."""
    fault, status = await refusal_details(call, reason, "no room", answer_s())
    retry, quota = error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
    found = [any(d.Unpack(kind) for d in status.details) for kind in (retry, quota)]
    expect(found[0] and retry.retry_delay != Duration(), "RetryInfo with a delay", status)
    expect(found[1] and bool(quota.violations), "QuotaFailure with a violation", status)
    expect(fault.quota is not None, "blocks_needed and blocks_free in the metadata", status)
