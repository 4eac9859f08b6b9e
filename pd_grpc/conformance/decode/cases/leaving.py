"""D62x and D63x: a client leaves, or its time is over, at each stage of the hand-over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pd_grpc.conformance.calls import check_metadata, refusal
from pd_grpc.conformance.case import Broken, NotApplicable, expect_equal, soon_s
from pd_grpc.conformance.decode import pool
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted, handed_off
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Code, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import types_pb2

GONE = "A client leg that ends before hand-off ends the transfer with CLIENT_GONE, and P is told"
TOLD = "by the answer to an Allocate that waits, otherwise by transfer_ended."
STAGES = (
    "on D prefill (its client waits for P), allocate, transfer, first_token, attach or"
    " decode; read where the caller did not take its answer."
)

TRIES = 3
"""Clients whose time runs out, of which one must be told in time."""


def deadline_s() -> float:
    """A client's time that is over soon, yet not before it has come that far."""
    return 2 * soon_s()


@case(620, GONE)
async def while_p_is_expected(d: DecodeHand) -> None:
    """The client leaves before P has asked; the Allocate that comes late is refused."""
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    await d.arrived()
    await leg.leave()
    await d.arrived()
    await p.allocate_refused(request, Reason.RELEASED, "the client has left")


@case(621, TOLD)
async def while_it_waits_for_blocks(d: DecodeHand) -> None:
    """The client leaves while the Allocate waits, which is answered by CLIENT_GONE."""
    p = await d.prefill()
    await pool.fill(d, p)
    request = d.request()
    leg = d.generate(request)
    await d.arrived()
    waiting = await pool.wait_in_queue(p, request, 0)
    await leg.leave()
    await refusal(waiting, Reason.CLIENT_GONE, "the client has left")
    await pool.queued(p, 0)


@case(622, TOLD)
async def while_it_is_reserved(d: DecodeHand) -> None:
    """The client leaves when blocks are granted; P hears of it on its session."""
    h = await granted(d)
    await d.arrived()
    await h.leg.leave()
    await _told(h)


@case(623, TOLD)
async def while_the_kv_comes(d: DecodeHand) -> None:
    """The client leaves while KV comes in; P hears of it on its session too."""
    h = await granted(d)
    transfer = await h.receiving()
    await transfer.send_all(h.kv()[:1])
    await h.leg.leave()
    await _told(h)
    await transfer.refused(Reason.CLIENT_GONE, "the client has left")


@case(624, TOLD)
async def while_the_first_token_is_awaited(d: DecodeHand) -> None:
    """The client leaves when all KV is there and no first token is."""
    h = await granted(d)
    await h.send_kv()
    await h.leg.leave()
    await _told(h)


@case(625, "the client's stream holds it.")
async def while_it_decodes(d: DecodeHand) -> None:
    """The client leaves in the middle of a long answer, which ends without being finished."""
    request = d.request()
    request.sampling.max_tokens = d.subject.room_tokens - len(request.tokens)
    h = await granted(d, request)
    await h.first_token(h.any_token)
    await h.send_kv()
    await h.leg.next()
    await h.leg.next()
    await h.leg.leave()
    await h.ends_as(types_pb2.TRANSFER_STATE_RELEASED)


@case(
    630,
    "Each hop answers 100 ms before its budget ends, so that its details reach the caller"
    " before the caller's own timer fires.",
)
async def time_is_over_while_p_is_expected(d: DecodeHand) -> None:
    """No P ever asks; the client hears of the stage before its own timer fires."""
    leg = d.generate(d.request(), timeout_s=deadline_s())
    fault = await leg.fails(Reason.STAGE_DEADLINE, "the client's time is nearly over")
    check_metadata(fault, stage="prefill")


@case(631, STAGES)
async def time_is_over_while_it_waits_for_blocks(d: DecodeHand) -> None:
    """The client's time ends while the Allocate waits: both hear of the stage."""
    p = await d.prefill()
    await pool.fill(d, p)

    async def run_out() -> None:
        request = d.request()
        leg = d.generate(request, timeout_s=deadline_s())
        await d.arrived()
        waiting = await pool.wait_in_queue(p, request, 0)
        fault = await leg.fails(Reason.STAGE_DEADLINE, "the client's time is nearly over")
        check_metadata(fault, stage="allocate")
        refused = await refusal(waiting, Reason.STAGE_DEADLINE, "no time")
        check_metadata(refused, stage="allocate")

    await _in_time(run_out)


@case(632, "The client's deadline is the request's budget and only shrinks.")
async def a_client_shortens_the_budget(d: DecodeHand) -> None:
    """P's budget is long, and the client who comes later has little time: both hear of it."""
    p = await d.prefill()

    async def run_out() -> None:
        request = d.request()
        h = HandOver(d, p, request, await p.allocate(request), None)
        h.client_comes(timeout_s=deadline_s())
        fault = await h.leg.fails(Reason.STAGE_DEADLINE, "the client's time is nearly over")
        check_metadata(fault, stage="transfer")
        ended = await p.told_of(request, "transfer_ended, for the client's time is over")
        expect_equal(ended.status.code, int(Code.DEADLINE_EXCEEDED), "status.code")

    await _in_time(run_out)


@case(633, STAGES)
async def time_is_over_while_the_first_token_is_awaited(d: DecodeHand) -> None:
    """The client's time ends when all KV is there and no first token is."""
    if d.times.first_token <= deadline_s():
        raise NotApplicable("the first token is not awaited for longer than the client has time")
    p = await d.prefill()

    async def run_out() -> None:
        request = d.request()
        h = HandOver(d, p, request, await p.allocate(request), None)
        h.client_comes(timeout_s=deadline_s())
        await h.send_kv()
        fault = await h.leg.fails(Reason.STAGE_DEADLINE, "the client's time is nearly over")
        check_metadata(fault, stage="first_token")

    await _in_time(run_out)


@case(634, STAGES)
async def time_is_over_while_the_client_is_awaited(d: DecodeHand) -> None:
    """All was handed over and the budget ends; the client who comes too late hears of the stage."""
    if d.times.attach <= deadline_s():
        raise NotApplicable("a client is not awaited for longer than the budget")
    h = await handed_off(d, budget=duration(deadline_s()))
    await h.ends_as(types_pb2.TRANSFER_STATE_FAILED)
    fault = await h.client_comes().fails(Reason.STAGE_DEADLINE, "the budget was over")
    check_metadata(fault, stage="attach")


async def _in_time(run_out: Callable[[], Awaitable[None]]) -> None:
    """The word must come in a client's last 100 ms; a busy machine may be late for some."""
    for left in reversed(range(TRIES)):
        try:
            return await run_out()
        except Broken:
            if not left:
                raise


async def _told(h: HandOver) -> None:
    ended = await h.p.told_of(h.request, "transfer_ended, for the client has left")
    expect_equal(ended.status.code, int(Code.CANCELLED), "status.code")
    expect_equal(ended.state, types_pb2.TRANSFER_STATE_RELEASED, "state")
