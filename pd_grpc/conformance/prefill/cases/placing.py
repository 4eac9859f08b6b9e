"""P21x to P23x: a D that will not have a request, and the next one."""

from __future__ import annotations

import time

from google.rpc import error_details_pb2, status_pb2

from pd_grpc.conformance.calls import check_metadata
from pd_grpc.conformance.case import answer_s, expect, expect_equal
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.decode import CONNECTION_LOST, KitTimes
from pd_grpc.conformance.prefill.subject import PrefillHand
from pd_grpc.protocol.faults import Code, Fault, Quota, Reason, TransportFault
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import decode_pb2, prefill_pb2

MOST_WAITING = 64
"""Requests that wait for one D to fill P's pool, if P held their blocks."""

NO_BLOCKS = Fault(Reason.NO_BLOCKS, "no blocks", retry_after_s=0.1, quota=Quota(3, 1))

TURNED_AWAY = (
    NO_BLOCKS,
    Fault(Reason.QUEUE_FULL, "the queue is full", retry_after_s=0.1, quota=Quota(3, 1)),
    Fault(Reason.DRAINING, "D drains"),
    Fault(Reason.ENGINE_STUCK, "D's engine makes no progress"),
    Fault(Reason.STALE_EPOCH, "another process"),
    Fault(Reason.LEASE_EXPIRED, "D forgot P"),
)
"""Refusals of Allocate that another D may not share."""

TURNED_DOWN = (
    Fault(Reason.BAD_REQUEST, "prompt_digest: 32 bytes"),
    Fault(Reason.TOO_LARGE, "it could never fit", {"needed": "9", "total": "8"}),
    Fault(Reason.HANDOFF_MISMATCH, "the legs differ", {"part": "sampling"}),
    Fault(Reason.DUPLICATE_TRANSFER, "in flight"),
    Fault(Reason.STALE_ATTEMPT, "an older attempt", {"attempt": "1", "newest": "2"}),
    Fault(Reason.RELEASED, "it has ended"),
    Fault(Reason.CLIENT_GONE, "the client left"),
    Fault(Reason.ENGINE_ERROR, "D's engine raised"),
)
"""Refusals that another D would only repeat."""

END_OF_CALL = (
    "A refusal that another D would only repeat, such as BAD_REQUEST, HANDOFF_MISMATCH or RELEASED,"
    " ends the call."
)
NEXT_ONE = (
    "A D that refuses, cannot be reached or drains before it has granted is left for the next of"
    " `decodes`, after placing."
)


@case(210, "with the fault's status otherwise, a refusal or failure of D's as D gave it.")
async def refusals_reach_the_caller(p: PrefillHand) -> None:
    """Each refusal of Allocate reaches a caller that named one D, with its code and reason."""
    for refusal in TURNED_AWAY + TURNED_DOWN:
        d = await p.decode()  # Another each time, for P may turn from one that takes nothing.
        d.allocate.refuse(refusal)
        what = f"D refused Allocate with {refusal.reason.value}"
        await p.call(p.request(), d).fails(refusal.reason, what)


@case(
    211,
    "NO_BLOCKS, and QUEUE_FULL of D, come with RetryInfo and QuotaFailure, whose numbers the "
    "metadata has as blocks_needed and blocks_free.",
)
async def details_reach_the_caller(p: PrefillHand) -> None:
    """What D says of its pool reaches the caller, and so does the part in which two legs differ."""
    d = await p.decode()
    d.allocate.refuse(NO_BLOCKS)
    fault = await p.call(p.request(), d).fails(Reason.NO_BLOCKS, "D has no blocks")
    expect_equal(fault.quota, NO_BLOCKS.quota, "the quota")
    expect(fault.retry_after_s is not None, "RetryInfo", "none")
    d.allocate.refuse(Fault(Reason.HANDOFF_MISMATCH, "the legs differ", {"part": "sampling"}))
    fault = await p.call(p.request(), d).fails(Reason.HANDOFF_MISMATCH, "the legs differ")
    expect_equal(dict(fault.metadata), {"part": "sampling"}, "the metadata")


@case(
    212,
    "It will ask another decode instance, and says so before it does, so that the client leg can"
    " move there first.",
)
async def placing_comes_first(p: PrefillHand) -> None:
    """A first D has no blocks: placing names the second one while that has not answered yet."""
    first, second = await p.decode(), await p.decode()
    first.allocate.refuse(NO_BLOCKS)
    second.hello.hold()
    caller = p.call(p.request(), first, second)
    placing: prefill_pb2.Placing = await caller.event("placing")
    expect_equal(placing.decode.endpoint, second.endpoint, "placing.decode.endpoint")
    expect_equal(placing.decode.name, second.instance.name, "placing.decode.name")
    expect_equal(second.allocate.seen, [], "the Allocates at the second D before placing")
    second.go()
    await caller.handed_off()


@case(213, NEXT_ONE)
async def each_refusal_leads_to_the_next(p: PrefillHand) -> None:
    """After each refusal that another D may not share, the second D gets the request."""
    second = await p.decode()
    for refusal in TURNED_AWAY:
        first = await p.decode()  # Another each time, for P may turn from one that takes nothing.
        first.allocate.refuse(refusal)
        caller = p.call(p.request(), first, second)
        handed = await caller.handed_off()
        expect_equal(handed.decode, second.instance, f"after {refusal.reason.value}, the D")
        expect_equal(caller.kinds.count("placing"), 1, "the number of placings")


@case(214, "Where to hand over: the first one, then alternates in order. At least one.")
async def alternates_in_order(p: PrefillHand) -> None:
    """Three Ds refuse in turn: each is asked once, in order, and the caller hears the last one."""
    ds = [await p.decode() for _ in range(3)]
    reasons = (Reason.NO_BLOCKS, Reason.ENGINE_STUCK, Reason.DRAINING)
    for d, reason in zip(ds, reasons, strict=True):
        d.allocate.refuse(Fault(reason, "not here"))
    caller = p.call(p.request(), *ds)
    await caller.fails(Reason.DRAINING, "what the last D said")
    placed = [e.placing.decode.endpoint for e in caller.events if e.HasField("placing")]
    expect_equal(placed, [d.endpoint for d in ds[1:]], "the Ds that placing named")
    expect_equal([len(d.allocate.seen) for d in ds], [1, 1, 1], "the Allocates at each D")


@case(215, END_OF_CALL)
async def no_second_opinion(p: PrefillHand) -> None:
    """After each refusal that another D would only repeat, the second D is not asked."""
    first, second = await p.decode(), await p.decode()
    for refusal in TURNED_DOWN:
        first.allocate.refuse(refusal)
        caller = p.call(p.request(), first, second)
        await caller.fails(refusal.reason, f"D refused with {refusal.reason.value}")
        expect_equal(caller.kinds.count("placing"), 0, "the number of placings")
    expect_equal(second.hello.seen, [], "the sessions with the second D")


@case(216, "UNAVAILABLE then means that the peer is lost, and no other is retried.")
async def statuses_of_the_transport(p: PrefillHand) -> None:
    """A bare UNAVAILABLE from Allocate leads to the second D, a bare RESOURCE_EXHAUSTED to the end
    of the call, and not as NO_BLOCKS."""
    first, second = await p.decode(), await p.decode()
    first.allocate.refuse(CONNECTION_LOST)
    await p.call(p.request(), first, second).handed_off()
    expect_equal(len(second.allocate.seen), 1, "the Allocates at the second D")
    first = await p.decode()  # P may turn from one that was lost, for a while.
    first.allocate.refuse(TransportFault(Code.RESOURCE_EXHAUSTED, "message too large"))
    ended = await p.call(p.request(), first, second).ends()
    expect(ended is not None, "a failed call", "OK")
    blocks = isinstance(ended, Fault) and ended.reason in (Reason.NO_BLOCKS, Reason.QUEUE_FULL)
    expect(not blocks, "a fault that says nothing of blocks", str(ended))
    expect_equal(len(second.allocate.seen), 1, "the Allocates at the second D")


@case(
    217,
    "A reason that the reader does not know is read by its code, as a status of the transport's.",
)
async def reasons_of_a_later_version(p: PrefillHand) -> None:
    """An UNAVAILABLE with a reason of a later version leads to the second D; an
    INVALID_ARGUMENT with one does not."""
    first, second = await p.decode(), await p.decode()
    first.allocate.refuse(_of_a_later_version(Code.UNAVAILABLE))
    await p.call(p.request(), first, second).handed_off()
    expect_equal(len(second.allocate.seen), 1, "the Allocates at the second D")
    first = await p.decode()  # P may turn from one that was lost, for a while.
    first.allocate.refuse(_of_a_later_version(Code.INVALID_ARGUMENT))
    ended = await p.call(p.request(), first, second).ends()
    expect(ended is not None, "a failed call", "OK")
    expect_equal(len(second.allocate.seen), 1, "the Allocates at the second D")


def _of_a_later_version(code: Code) -> status_pb2.Status:
    status = status_pb2.Status(code=int(code), message="of a later version")
    info = error_details_pb2.ErrorInfo(domain="pd_grpc", reason="MOON_PHASE")
    status.details.add().Pack(info)
    return status


@case(
    220,
    "UNAVAILABLE with DRAINING while P drains, with ENGINE_STUCK or SENDER_STUCK while it"
    " makes no progress, with DECODE_LOST when D is lost before the hand-off.",
)
async def nobody_listens(p: PrefillHand) -> None:
    """Nobody listens at D's address: the caller hears DECODE_LOST at once, and with an alternate
    the request is handed over there."""
    began = time.monotonic()
    await p.call(p.request(), p.closed_endpoint()).fails(Reason.DECODE_LOST, "nobody listens")
    took = time.monotonic() - began
    expect(took < answer_s(), f"an answer within {answer_s():g} s", f"{took:.1f} s")
    d = await p.decode()
    caller = p.call(p.request(), p.closed_endpoint(), d)
    await caller.handed_off()
    expect_equal(caller.kinds.count("placing"), 1, "the number of placings")


@case(221, "D takes nothing new.")
async def a_decode_that_drains(p: PrefillHand) -> None:
    """D has said that it drains: it is asked no more, a request that names it alone hears DRAINING
    and one with an alternate is handed over there."""
    first, second = await p.decode(KitTimes(heartbeat=0.2, lease=0.6)), await p.decode()
    await p.call(p.request(), first).handed_off()
    beats = len(first.session.heartbeats)
    first.session.say(drain=decode_pb2.Drain(deadline=duration(30)))
    # Its answers come in order, and P hears the ack after the drain.
    await first.session.heartbeat("two more heartbeats", beats + 2)
    await p.call(p.request(), first).fails(Reason.DRAINING, "D drains")
    await p.call(p.request(), first, second).handed_off()
    expect_equal(len(first.allocate.seen), 1, "the Allocates at the D that drains")


@case(222, "another instance listens at the address")
async def another_name_at_the_address(p: PrefillHand) -> None:
    """D is not the instance that the request means: the caller hears WRONG_INSTANCE, and with an
    alternate the request is handed over there."""
    d, second = await p.decode(), await p.decode()
    wrong = Fault(Reason.WRONG_INSTANCE, "this is another", {"field": "decode_name"})
    d.hello.refuse(wrong, wrong)
    await p.call(p.request(), d).fails(Reason.WRONG_INSTANCE, "D refused Hello")
    await p.call(p.request(), d, second).handed_off()
    expect_equal(d.allocate.seen, [], "the Allocates at the first D")


@case(223, "model, layout, transport or ranks differ")
async def a_layout_that_does_not_fit(p: PrefillHand) -> None:
    """D refuses Hello with LAYOUT_MISMATCH: the caller hears it with the field and both values."""
    d = await p.decode()
    said = {"field": "block_size", "ours": "16", "theirs": "32"}
    d.hello.refuse(Fault(Reason.LAYOUT_MISMATCH, "the layouts differ", said))
    fault = await p.call(p.request(), d).fails(Reason.LAYOUT_MISMATCH, "D refused Hello")
    expect_equal(dict(fault.metadata), said, "the metadata")


@case(
    224,
    "where it is not, and the first of `decodes` is another process, the call is refused with"
    " STALE_EPOCH.",
)
async def another_process_is_meant(p: PrefillHand) -> None:
    """A ref that names D's epoch is handed over; one that names another is refused, and D is asked
    for no blocks."""
    d = await p.decode()
    await p.call(p.request(decode_epoch=d.instance.epoch), d).handed_off()
    stale = p.request(decode_epoch=d.instance.epoch - 1)
    await p.call(stale, d).fails(Reason.STALE_EPOCH, "another process of D is meant")
    expect_equal(len(d.allocate.seen), 1, "the number of Allocates")


@case(
    227,
    "STALE_EPOCH and WRONG_INSTANCE have meant and here, which is empty where nobody told, but"
    " STALE_EPOCH of a hello has epoch and newest",
)
async def who_was_meant_and_who_is_there(p: PrefillHand) -> None:
    """A request that names another P, another D, or another process of D is refused with both
    names, or both epochs, whether P has a session with that D or not."""
    d, other = await p.decode(), await p.decode()
    await p.call(p.request(), d).handed_off()
    name = d.hello.seen[0].instance.name
    fault = await p.refused(p.request(), Reason.WRONG_INSTANCE, "another P", prefill_name="kit-no")
    check_metadata(fault, meant="kit-no", here=name)
    for there in (d, other):
        target = prefill_pb2.DecodeTarget(name="kit-no", endpoint=there.endpoint)
        caller = p.call(p.request(), decodes=[target])
        fault = await caller.fails(Reason.WRONG_INSTANCE, "another D is meant")
        check_metadata(fault, meant="kit-no", here=there.instance.name)
    epoch = d.instance.epoch
    fault = await p.call(p.request(decode_epoch=epoch - 1), d).fails(Reason.STALE_EPOCH, "epochs")
    check_metadata(fault, meant=epoch - 1, here=epoch)


@case(225, "A D that is slow, full or silent delays only the requests meant for it.")
async def a_silent_decode_delays_no_other(p: PrefillHand) -> None:
    """Many requests wait for a D that answers no Allocate, and as many for one that answers no
    Hello; a request for a third D is handed over."""
    silent, deaf, quick = await p.decode(), await p.decode(), await p.decode()
    silent.allocate.hold()
    deaf.hello.hold()
    for _ in range(12):
        p.call(p.request(4), silent)
        p.call(p.request(4), deaf)
    await silent.allocate.came("an Allocate")
    await deaf.hello.came("a Hello")
    await p.call(p.request(), quick).handed_off()


@case(226, "A request that waits for D holds no block of P's.")
async def waiting_holds_no_block(p: PrefillHand) -> None:
    """Requests that would fill P's pool wait for a D that grants nothing; one more of their size is
    handed over to another D."""
    number, tokens = p.filling(MOST_WAITING)
    silent, quick = await p.decode(), await p.decode()
    silent.allocate.hold()
    for _ in range(number):
        p.call(p.request(tokens), silent)
    await silent.allocate.came(f"{number} Allocates", number)
    await p.call(p.request(tokens), quick).handed_off()
