"""D50x and D51x: how a transfer ends, and what D remembers of it."""

from __future__ import annotations

import asyncio

from google.rpc import code_pb2, status_pb2

from pd_grpc.conformance.calls import check_fault, check_metadata, refusal
from pd_grpc.conformance.case import NotApplicable, answer_s, expect_equal, soon_s
from pd_grpc.conformance.decode import pool
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import types_pb2

FAILED = types_pb2.TRANSFER_STATE_FAILED
FINISHED = types_pb2.TRANSFER_STATE_FINISHED
RELEASED = types_pb2.TRANSFER_STATE_RELEASED

CAUSE = "Why; D passes it to its client leg, and the transfer is FAILED."
RECORDED = "for a transfer that has ended it answers the recorded state with OK."
SESSION = "A call whose session_id is unknown or superseded is FAILED_PRECONDITION with NO_SESSION."
EPOCH = "Any other process of D refuses it with FAILED_PRECONDITION, STALE_EPOCH."
ANY_EPOCH = (
    'Epoch of the decode instance meant. 0 means "whichever answers", allowed only in Generate and '
    "Prefill"
)


@case(
    501,
    "Unset or OK means given back without a fault: the transfer is RELEASED, and so the client "
    "hears.",
)
async def given_back_without_a_fault(d: DecodeHand) -> None:
    """P gives a grant back without a cause."""
    h = await granted(d)
    expect_equal(await h.p.release(h.request), RELEASED, "the state")
    await h.leg.fails(Reason.RELEASED, "P gave it back")


@case(502, CAUSE)
async def given_back_for_a_fault(d: DecodeHand) -> None:
    """P's engine failed: D's client hears that."""
    h = await granted(d)
    cause = Fault(Reason.ENGINE_ERROR, "the kit's engine failed")
    expect_equal(await h.p.release(h.request, cause), FAILED, "the state")
    await h.leg.fails(Reason.ENGINE_ERROR, "P's engine failed")


@case(503, CAUSE)
async def the_details_of_a_cause(d: DecodeHand) -> None:
    """P ran out of time while it computed: D's client hears which stage that was."""
    h = await granted(d)
    cause = Fault(Reason.STAGE_DEADLINE, "no time is left", {"stage": "compute"})
    await h.p.release(h.request, cause)
    check_metadata(await h.leg.fails(Reason.STAGE_DEADLINE, "P's time is over"), stage="compute")


@case(504, "A failure carries the code that the status table lets a client see, and its reason.")
async def a_cause_with_another_code_for_clients(d: DecodeHand) -> None:
    """P met a layout that differs, which clients see as UNAVAILABLE."""
    h = await granted(d)
    await h.p.release(h.request, Fault(Reason.LAYOUT_MISMATCH, "another layout"))
    check_fault(
        await h.leg.outcome(), Reason.LAYOUT_MISMATCH, "P's fault, for clients", Code.UNAVAILABLE
    )


@case(505, "A cause that is not the protocol's own reaches the client as PREFILL_LOST.")
async def a_cause_of_another_kind(d: DecodeHand) -> None:
    """P gives back with a status that carries no ErrorInfo."""
    h = await granted(d)
    cause = status_pb2.Status(code=code_pb2.UNKNOWN, message="something else")
    expect_equal(await h.p.release(h.request, cause), FAILED, "the state")
    await h.leg.fails(Reason.PREFILL_LOST, "a cause that is not the protocol's own")


@case(506, f"Idempotent: {RECORDED}")
async def given_back_again(d: DecodeHand) -> None:
    """A transfer that has FAILED is given back again, without a cause, and stays FAILED."""
    h = await granted(d)
    await h.p.release(h.request, Fault(Reason.ENGINE_ERROR, "the kit's engine failed"))
    expect_equal(await h.p.release(h.request), FAILED, "the recorded state")


@case(507, RECORDED)
async def a_late_first_token(d: DecodeHand) -> None:
    """A first token that comes after the end is answered by the end."""
    h = await granted(d)
    await h.p.release(h.request)
    expect_equal(await h.first_token(h.any_token), RELEASED, "the recorded state")


@case(508, "A late Allocate for it is ABORTED with RELEASED.")
async def a_late_allocate(d: DecodeHand) -> None:
    """P asks again for a transfer that it has given back."""
    h = await granted(d)
    await h.p.release(h.request)
    await h.p.allocate_refused(h.request, Reason.RELEASED, "the transfer has ended")


@case(509, "For an unknown ref it leaves a tombstone, so that an Allocate it overtook is refused.")
async def given_back_before_it_was_asked_for(d: DecodeHand) -> None:
    """Release comes first and Allocate after it."""
    p = await d.prefill()
    request = d.request()
    expect_equal(await p.release(request), RELEASED, "the state")
    await p.allocate_refused(request, Reason.RELEASED, "Release overtook the Allocate")


@case(510, "the transfer has ended: given back, or by an operator")
async def given_back_while_it_waits(d: DecodeHand) -> None:
    """Release ends an Allocate that waits for blocks."""
    p = await d.prefill()
    await pool.fill(d, p)
    request = d.request()
    waiting = await pool.wait_in_queue(p, request, 0)
    await p.release(request)
    await refusal(waiting, Reason.RELEASED, "it was given back")


@case(511, "A transfer that has ended leaves a tombstone for Welcome.tombstone.")
async def a_tombstone_ends(d: DecodeHand) -> None:
    """Once the announced time is over, the same ref is granted anew."""
    wait = d.times.tombstone
    if not 0 < wait <= d.subject.patience_s / 2:
        raise NotApplicable(f"D remembers for {wait:g} s, longer than the case can wait")
    h = await granted(d)
    await h.p.release(h.request)
    await h.p.allocate_refused(h.request, Reason.RELEASED, "the transfer has ended")
    await asyncio.sleep(1.05 * wait)
    await h.p.allocate(h.request)


@case(512, "a call of P's for another's transfer is PERMISSION_DENIED with NOT_OWNER.")
async def given_back_by_another_prefill(d: DecodeHand) -> None:
    """Another P gives the transfer back and is refused, which hurts nothing."""
    h = await granted(d)
    other = await d.prefill()
    await refusal(other.give_back(h.request), Reason.NOT_OWNER, "another's transfer")
    await h.completes()


@case(513, SESSION)
async def given_back_in_a_superseded_session(d: DecodeHand) -> None:
    """Release in the name of the session before is refused, and hurts nothing."""
    h = await granted(d)
    before = h.p.welcome.session_id
    await h.p.join()
    call = h.p.give_back(h.request, session_id=before)
    await refusal(call, Reason.NO_SESSION, "a superseded session")
    await h.completes()


@case(514, EPOCH)
async def a_first_token_for_another_process(d: DecodeHand) -> None:
    """The first token names an epoch before D's, and is refused with both."""
    h = await granted(d)
    ref = h.request.ref
    ref.decode_epoch -= 1
    fault = await h.first_token_refused(Reason.STALE_EPOCH, "another process", ref=ref)
    check_metadata(fault, meant=ref.decode_epoch, here=d.subject.instance.epoch)
    await h.completes()


@case(515, EPOCH)
async def given_back_to_another_process(d: DecodeHand) -> None:
    """Release names an epoch before D's, and is refused with both."""
    h = await granted(d)
    ref = h.request.ref
    ref.decode_epoch -= 1
    fault = await refusal(h.p.give_back(h.request, ref=ref), Reason.STALE_EPOCH, "another process")
    check_metadata(fault, meant=ref.decode_epoch, here=d.subject.instance.epoch)
    await h.completes()


@case(516, ANY_EPOCH)
async def prefills_name_the_process(d: DecodeHand) -> None:
    """First token and Release without an epoch are refused."""
    h = await granted(d)
    ref = h.request.ref
    ref.decode_epoch = 0
    await h.first_token_refused(Reason.STALE_EPOCH, "no epoch", ref=ref)
    await refusal(h.p.give_back(h.request, ref=ref), Reason.STALE_EPOCH, "no epoch")
    await h.completes()


@case(517, "No transfer outlives its budget before hand-off: STAGE_DEADLINE.")
async def the_budget_of_a_grant(d: DecodeHand) -> None:
    """The budget ends while D waits for KV: client and P hear of it, and of the stage."""
    budget = soon_s()
    h = await granted(d, budget=duration(budget))
    fault = await h.leg.fails(Reason.STAGE_DEADLINE, "the budget is over", budget + answer_s())
    check_metadata(fault, stage="transfer")
    ended = await h.p.told_of(h.request, "transfer_ended, for the budget is over")
    expect_equal(ended.state, FAILED, "state")


@case(518, "Ends are final.")
async def what_comes_after_a_whole_answer(d: DecodeHand) -> None:
    """After a whole answer Release and first token say FINISHED, and Allocate is refused."""
    h = await granted(d)
    await h.completes()
    cause = Fault(Reason.ENGINE_ERROR, "too late")
    expect_equal(await h.p.release(h.request, cause), FINISHED, "the recorded state")
    expect_equal(await h.first_token(), FINISHED, "the recorded state")
    await h.p.allocate_refused(h.request, Reason.RELEASED, "the transfer has ended")


@case(519, "Gives a transfer back, with the cause for D's own client leg.")
async def blocks_go_back(d: DecodeHand) -> None:
    """What one transfer gives back is granted at once to one that waits, KV or not."""
    d.needs_blocks(2)
    p = await d.prefill()
    h = await granted(d, pool.request_of(d, 2), p=p)
    transfer = await h.receiving()
    await transfer.send_all(h.kv()[:1])
    await pool.fill(d, p, leave=2)
    waiting = await pool.wait_in_queue(p, pool.request_of(d, 2), 0)
    await p.release(h.request)
    await pool.granted(p, waiting, "the blocks that were given back")
