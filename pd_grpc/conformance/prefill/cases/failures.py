"""P5xx: a request that fails on its way, and who hears of it."""

from __future__ import annotations

from pd_grpc.conformance.calls import check_fault
from pd_grpc.conformance.case import answer_s, expect, expect_equal
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.decode import CONNECTION_LOST, KitDecode, KitTimes
from pd_grpc.conformance.prefill.subject import PrefillHand
from pd_grpc.conformance.request import Request
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault, read_status
from pd_grpc.v1 import decode_pb2, types_pb2

TRIES = 3
"""A busy machine may hold P up for the 100 ms that it has to answer in, but not every time."""

IN_TIME = (
    "Each hop answers 100 ms before its budget ends, so that its details reach the caller before"
    " the caller's own timer fires."
)
STAGES = "on P queue, allocate, compute, first_token or transfer;"
RELEASES = (
    "P sends it whenever an Allocate ended without an answer of D's (deadline, cancel, lost"
    " connection)."
)


@case(501, "P fails their transfers at once, with LEASE_EXPIRED.")
async def a_grant_that_d_does_not_know(p: PrefillHand) -> None:
    """D has lost a grant that a heartbeat lists: its caller hears LEASE_EXPIRED, the other one
    nothing."""
    d = await p.decode(KitTimes(heartbeat=0.2, lease=0.6))
    d.kv.end.hold()
    lost, kept = p.request(p.block_size), p.request(p.block_size)
    caller, other = p.call(lost, d), p.call(kept, d)
    for request in (lost, kept):
        await d.granted(request.ref)
    await d.first_token.came("both first tokens", 2)
    await d.kv.end.came("both ends", 2)
    d.forget(lost.ref)
    limit = 2 * d.times.heartbeat + answer_s()
    await caller.fails(Reason.LEASE_EXPIRED, "D does not know the grant", limit)
    d.go()
    await other.handed_off()


@case(502, "Why, with details as any call would have carried them.")
async def ends_on_d_reach_the_caller(p: PrefillHand) -> None:
    """D tells of ends of all kinds: each caller hears reason and metadata, and D no Release."""
    d = await p.decode(KitTimes(heartbeat=2 * answer_s()))
    d.kv.end.hold()
    ends = (
        (Fault(Reason.CLIENT_GONE, "the client left"), types_pb2.TRANSFER_STATE_RELEASED),
        (Fault(Reason.LEASE_EXPIRED, "not renewed"), types_pb2.TRANSFER_STATE_EXPIRED),
        (
            Fault(Reason.HANDOFF_MISMATCH, "the legs differ", {"part": "sampling"}),
            types_pb2.TRANSFER_STATE_FAILED,
        ),
        (
            Fault(Reason.STAGE_DEADLINE, "its time is over", {"stage": "transfer"}),
            types_pb2.TRANSFER_STATE_FAILED,
        ),
    )
    for number, (fault, state) in enumerate(ends, 1):
        request = p.request()
        caller = p.call(request, d)
        await d.kv.end.came("end", number)
        d.end(request.ref, fault, state)
        heard = await caller.fails(fault.reason, f"D told of {fault.reason.value}")
        expect_equal(dict(heard.metadata), dict(fault.metadata), "the metadata")
    expect_equal(d.release.seen, [], "the Releases of what D has ended itself")


@case(503, "The end it reached: FINISHED, FAILED, RELEASED or EXPIRED.")
async def an_end_without_a_status(p: PrefillHand) -> None:
    """D tells of an end with its state alone: the caller hears a fault."""
    d = await p.decode(KitTimes(heartbeat=2 * answer_s()))
    d.kv.end.hold()
    request = p.request()
    caller = p.call(request, d)
    await d.kv.end.came("end")
    ref = request.ref
    ref.decode_epoch = d.instance.epoch
    state = types_pb2.TRANSFER_STATE_RELEASED
    d.session.say(transfer_ended=decode_pb2.TransferEnded(ref=ref, state=state))
    ended = await caller.ends()
    expect(isinstance(ended, Fault), "a fault", "OK" if ended is None else str(ended))


@case(504, RELEASES)
async def a_lost_allocate_is_released(p: PrefillHand) -> None:
    """The connection is lost under Allocate: D hears Release for that ref."""
    d = await p.decode()
    d.allocate.refuse(CONNECTION_LOST)
    request = p.request()
    await p.call(request, d).fails(Reason.DECODE_LOST, "the connection is lost")
    await _released(d, request.ref)


@case(505, RELEASES)
async def an_allocate_out_of_time_is_released(p: PrefillHand) -> None:
    """D answers no Allocate until the caller's time is over: D hears Release and why."""
    d = await p.decode()
    d.allocate.hold()
    request = await _out_of_time(p, d, "allocate")
    await _released(d, request.ref, Reason.STAGE_DEADLINE)


@case(506, "Gives a transfer back, with the cause for D's own client leg.")
async def d_hears_the_cause(p: PrefillHand) -> None:
    """The caller's time ends while D holds back completed: Release tells D so, with the stage."""
    d = await p.decode()
    d.kv.end.hold()
    request = await _out_of_time(p, d, "transfer")
    cause = await _released(d, request.ref, Reason.STAGE_DEADLINE)
    expect_equal(cause.metadata.get("stage"), "transfer", "the stage")


@case(510, IN_TIME)
async def an_answer_before_the_callers_timer(p: PrefillHand) -> None:
    """D answers nothing: the caller hears STAGE_DEADLINE, and not its own timer's status."""
    d = await p.decode()
    d.allocate.hold()
    await _out_of_time(p, d, "allocate")


@case(511, STAGES)
async def time_spent_in_the_queue(p: PrefillHand) -> None:
    """D answers no Hello: the stage is queue, or DECODE_LOST where P gives D up before."""
    d = await p.decode()
    d.hello.hold()
    budget_s = await p.brief_s()
    caller = p.call(p.request(), d, timeout_s=budget_s)
    ended = await caller.ends(budget_s + answer_s())
    ours = isinstance(ended, Fault)
    expect(ours, "a fault of the protocol's", "OK" if ended is None else str(ended))
    if isinstance(ended, Fault) and ended.reason is not Reason.DECODE_LOST:
        expect(ended.reason is Reason.STAGE_DEADLINE, "STAGE_DEADLINE", str(ended))
        expect_equal(ended.metadata.get("stage"), "queue", "the stage")


@case(512, STAGES)
async def time_spent_on_the_first_token(p: PrefillHand) -> None:
    """D has all KV and does not answer the first token: the stage is first_token."""
    d = await p.decode()
    d.first_token.hold()
    await _out_of_time(p, d, "first_token")


@case(513, STAGES)
async def time_spent_on_the_kv(p: PrefillHand) -> None:
    """D has the first token and does not verify the KV: the stage is transfer."""
    d = await p.decode()
    d.kv.chunk.hold()
    await _out_of_time(p, d, "transfer")


@case(520, "ALREADY_EXISTS with DUPLICATE_TRANSFER for another first token than the one D has;")
async def a_first_token_refused(p: PrefillHand) -> None:
    """D refuses the first token: the caller hears the fault."""
    d = await p.decode()
    for reason in (Reason.DUPLICATE_TRANSFER, Reason.UNKNOWN_TRANSFER):
        d.first_token.refuse(Fault(reason, "not this one"))
        await p.call(p.request(), d).fails(reason, "D refused the first token")


async def _out_of_time(p: PrefillHand, d: KitDecode, stage: str) -> Request:
    """The request whose caller has heard that its time ran out in this stage."""
    budget_s = await p.brief_s()
    for _ in range(TRIES):
        request = p.request()
        caller = p.call(request, d, timeout_s=budget_s)
        ended = await caller.ends(budget_s + answer_s())
        if isinstance(ended, TransportFault):
            if ended.code is not Code.DEADLINE_EXCEEDED:
                break
        elif not isinstance(ended, Fault) or ended.metadata.get("stage", stage) == stage:
            break
        # A busy machine has spent the time before the stage began, or before P could say so.
    fault = check_fault(ended, Reason.STAGE_DEADLINE, "the caller's time is over")
    expect("handed_off" not in caller.kinds, "no handed_off before a fault", caller.kinds)
    expect_equal(fault.metadata.get("stage"), stage, "the stage")
    return request


async def _released(d: KitDecode, ref: types_pb2.TransferRef, why: Reason | None = None) -> Fault:
    """D has heard Release for a ref; the cause, which must be `why` where that is given."""
    what, number = f"Release of {ref.transfer_id}", 1
    while (release := await d.release.came(what, number)).ref.transfer_id != ref.transfer_id:
        number += 1
    expect_equal(release.ref.attempt, ref.attempt, "ref.attempt of Release")
    cause: Fault | TransportFault = read_status(release.cause)
    if why is None:
        return cause if isinstance(cause, Fault) else Fault(Reason.RELEASED, "no cause")
    expect(isinstance(cause, Fault) and cause.reason is why, f"the cause {why.value}", str(cause))
    assert isinstance(cause, Fault)
    return cause
