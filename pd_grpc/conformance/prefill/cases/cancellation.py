"""P6xx: the caller leaves, at each stage."""

from __future__ import annotations

import time

from pd_grpc.conformance.case import NotApplicable, eventually, expect, expect_equal, within
from pd_grpc.conformance.prefill.caller import Caller
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.decode import KitDecode, KitTimes
from pd_grpc.conformance.prefill.shard import IncomingKv
from pd_grpc.conformance.prefill.subject import PrefillHand
from pd_grpc.protocol.faults import Fault, Reason, read_status
from pd_grpc.v1 import types_pb2

MOST_COMPUTED = 8
"""Prompts that are computed to fill P's pool."""
LONG_S = 0.5
"""A compute that takes so long is seen to stop."""

CANCEL = (
    "Cancelling it leaves the queue at once, stops the compute by the next chunk and releases D"
    " with CLIENT_GONE."
)


@case(601, CANCEL)
async def in_the_queue(p: PrefillHand) -> None:
    """The caller leaves while D has not answered Hello; D is never asked for that request, and the
    next one is handed over."""
    d = await p.decode()
    d.hello.hold()
    leaving, staying = p.request(), p.request()
    caller, other = p.call(leaving, d), p.call(staying, d)
    await caller.event("queued")
    await other.event("queued")
    await caller.leave()
    await p.gone(leaving.ref)
    d.go()
    await other.handed_off()
    asked = [m.ref.transfer_id for m in d.allocate.seen]
    expect_equal(asked, [staying.transfer_id], "the Allocates")


@case(602, CANCEL)
async def under_allocate(p: PrefillHand) -> None:
    """The caller leaves while Allocate waits: P ends that call and releases D."""
    d = await p.decode()
    d.allocate.hold()
    request = p.request()
    caller = p.call(request, d)
    await d.allocate.came("Allocate")
    await caller.leave()
    await d.allocate.was_left("the end of the Allocate call")
    await _released(d, request.ref)


@case(603, CANCEL)
async def while_kv_is_sent(p: PrefillHand) -> None:
    """The caller leaves while D verifies no KV: P releases D and ends the Transfer."""
    d = await p.decode()
    d.kv.chunk.hold()
    request = p.request()
    caller = p.call(request, d)
    await d.kv.chunk.came("a chunk")
    await caller.leave()
    await _released(d, request.ref)
    await _over(d.streams[0])


@case(604, CANCEL)
async def under_the_first_token(p: PrefillHand) -> None:
    """The caller leaves while D has not answered the first token: P releases D."""
    d = await p.decode()
    d.first_token.hold()
    request = p.request()
    caller = p.call(request, d)
    await d.first_token.came("the first token")
    await caller.leave()
    await _released(d, request.ref)


@case(605, CANCEL)
async def in_the_middle_of_a_long_prompt(p: PrefillHand) -> None:
    """The callers of prompts that fill P's pool leave at the first progress: P releases D for each,
    and another prompt as long is handed over."""
    number, tokens = p.filling(MOST_COMPUTED)
    # A D each, for P may keep some of its pool from one that takes KV slowly.
    decodes = [await p.decode() for _ in range(number)]
    requests = [p.request(tokens) for _ in decodes]
    for d in decodes:
        d.kv.chunk.hold()
    callers = [p.call(*pair) for pair in zip(requests, decodes, strict=True)]
    for caller in callers:
        await caller.event("progress")
    for d, request, caller in zip(decodes, requests, callers, strict=True):
        await caller.leave()
        await _released(d, request.ref)
    await p.call(p.request(tokens), await p.decode()).handed_off()


@case(608, CANCEL)
async def the_compute_stops(p: PrefillHand) -> None:
    """The caller of a long prompt leaves at the first progress: P has its blocks back in less than
    half the time that an equal prompt takes from there to the last progress."""
    _, tokens = p.filling(2)
    d = await p.decode()
    takes_s = await _computing_s(p.call(p.request(tokens), d))
    if takes_s < LONG_S:
        raise NotApplicable(f"P computes {tokens} tokens in {takes_s:.2f} s, too fast to see")
    caller = p.call(p.request(tokens), d)
    await caller.event("progress")
    await caller.leave()
    what = f"P's blocks free within {takes_s / 2:.2f} s, as the compute stops by the next chunk"
    await eventually(p.subject.look, lambda _: not p.subject.held_blocks, what, takes_s / 2)


async def _computing_s(caller: Caller) -> float:
    """From the first progress to the last; read to the hand-off."""
    await caller.event("progress")
    first = last = time.monotonic()
    while (event := await caller.stream.next("the next event of Prefill")) is not None:
        if event.HasField("progress"):
            last = time.monotonic()
    await caller.stream.fine("the request was handed off")
    return last - first


@case(606, CANCEL)
async def the_alternate_is_released(p: PrefillHand) -> None:
    """The caller leaves while the alternate is asked: P releases that one."""
    first, second = await p.decode(), await p.decode()
    first.allocate.refuse(Fault(Reason.NO_BLOCKS, "none"))
    second.allocate.hold()
    request = p.request()
    caller = p.call(request, first, second)
    await second.allocate.came("Allocate")
    await caller.leave()
    await _released(second, request.ref)


@case(607, "Every grant P holds. D renews these alone, each for another Welcome.lease.")
async def heartbeats_forget_what_was_left(p: PrefillHand) -> None:
    """After the caller has left, heartbeats list its grant no more."""
    d = await p.decode(KitTimes(heartbeat=0.2, lease=0.6))
    d.kv.chunk.hold()
    request = p.request()
    caller = p.call(request, d)
    grant = await d.granted(request.ref)
    await d.session.lists([grant.grant_id], "a heartbeat that lists the grant")
    await caller.leave()
    await d.session.lists([], "a heartbeat that lists no grant")


async def _released(d: KitDecode, ref: types_pb2.TransferRef) -> None:
    release = await d.release.came("Release")
    expect_equal(release.ref.transfer_id, ref.transfer_id, "ref.transfer_id of Release")
    cause = read_status(release.cause)
    gone = isinstance(cause, Fault) and cause.reason is Reason.CLIENT_GONE
    expect(gone, "the cause CLIENT_GONE", str(cause))


async def _over(stream: IncomingKv) -> None:
    await within(None, stream.ended.wait(), "the end of the Transfer")
