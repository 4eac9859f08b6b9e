"""D11x and D129: heartbeats, what they renew and what they tell."""

from __future__ import annotations

import asyncio
import time

from pd_grpc.conformance.calls import Stream
from pd_grpc.conformance.case import NotApplicable, answer_s, eventually, expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.pool import fill, free, queued, request_of
from pd_grpc.conformance.decode.prefill import KitPrefill
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Reason, read_status
from pd_grpc.v1 import decode_pb2, sampling_pb2, types_pb2

NO_GRANT = "kit-made-this-up"
LONG_ANSWER = 2000
TRIES = 5
"""Answers that may be complete before D has been asked, on a machine that is busy."""


@case(110, "Heartbeats renew the listed grants alone.")
async def heartbeats_renew_grants(d: DecodeHand) -> None:
    """A grant that heartbeats list is alive after its lease; one that they do not list is not."""
    d.needs_blocks(4)
    p = await d.prefill()
    kept, dropped = d.request(), d.request()
    held = await p.allocate(kept)
    lost = await p.allocate(dropped, hold=False)
    await p.told_of(dropped, "the end of a grant not listed", d.times.lease + answer_s())
    ack = await p.heartbeat(held.grant_id, lost.grant_id)
    expect_equal(list(ack.unknown_grant_ids), [lost.grant_id], "unknown_grant_ids")
    leg = d.generate(kept)
    await HandOver(d, p, kept, held, leg).completes()


@case(111, "D hands it back and draws nothing else from it.")
async def acks_carry_the_sequence(d: DecodeHand) -> None:
    """Heartbeats are acknowledged in order, each with its own sequence, whatever that is."""
    stream = await _welcomed(d.new_prefill())
    sequences = [7, 7, 3, 2**64 - 1, 1]
    for sequence in sequences:
        await _beat(stream, sequence)
    acks = [await _ack(stream) for _ in sequences]
    expect_equal(acks, sequences, "the sequences of the acks")


@case(
    112,
    "Listed grants that D does not know as this P's; P fails their transfers at once, with"
    " LEASE_EXPIRED.",
)
async def unknown_grants_are_named(d: DecodeHand) -> None:
    """Of three grants listed, the ack names the one made up and the one of another P."""
    d.needs_blocks(4)
    p, other = await d.prefill(), await d.prefill()
    mine = await p.allocate(d.request())
    theirs = await other.allocate(d.request())
    ack = await p.heartbeat(mine.grant_id, NO_GRANT, theirs.grant_id)
    unknown = sorted(ack.unknown_grant_ids)
    expect_equal(unknown, sorted([NO_GRANT, theirs.grant_id]), "unknown_grant_ids")


@case(113, "Only the session's P may touch its transfers")
async def nobody_renews_for_another(d: DecodeHand) -> None:
    """A grant that another P lists, and its own does not, ends with its lease."""
    p, other = await d.prefill(), await d.prefill()
    request = d.request()
    grant = await p.allocate(request, hold=False)
    other.held.add(grant.grant_id)
    await other.heartbeat(grant.grant_id)
    await p.told_of(
        request, "the end of a grant that its P does not list", d.times.lease + answer_s()
    )


@case(114, "A grant that was handed off is known while its transfer lives.")
async def a_grant_handed_off_is_known(d: DecodeHand) -> None:
    """A heartbeat lists a grant whose transfer is handed off and waits for its client."""
    p = await d.prefill()
    request = d.request()
    grant = await p.hand_over(request, d.first_token(request))
    ack = await p.heartbeat(grant.grant_id)
    expect_equal(list(ack.unknown_grant_ids), [], "unknown_grant_ids")
    await HandOver(d, p, request, grant, d.generate(request)).answers()


@case(
    115,
    "A lease that ends brings the transfer to EXPIRED: client and P hear LEASE_EXPIRED, and the"
    " blocks go back.",
)
async def both_hear_of_a_lease_that_ends(d: DecodeHand) -> None:
    """Nobody renews a grant: its client and its P are told, and not before the lease is over."""
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    grant = await p.allocate(request, hold=False)
    await leg.shows_nothing(0.75 * d.times.lease, f"grant {grant.grant_id} alive for its lease")
    await leg.fails(Reason.LEASE_EXPIRED, "the lease has ended", d.times.lease + answer_s())
    ended = await p.told_of(request, "the end of the grant")
    expect_equal(ended.state, types_pb2.TRANSFER_STATE_EXPIRED, "state")
    fault = read_status(ended.status)
    expired = getattr(fault, "reason", None) is Reason.LEASE_EXPIRED
    expect(expired, "a status with LEASE_EXPIRED", fault)


@case(
    116,
    "D's load, after the ack of the first heartbeat and of each one before which it has changed.",
)
async def load_follows_the_ack(d: DecodeHand) -> None:
    """Blocks are granted and given back; each time the next heartbeat brings the new count."""
    d.needs_blocks(3)
    p = await d.prefill()
    total = d.subject.total_blocks
    for blocks in (3, 2):
        request = request_of(d, blocks)
        await p.allocate(request)
        load = await p.load_now()
        expect_equal(load.total_blocks, total, "total_blocks")
        expect_equal(load.free_blocks, total - blocks, f"free_blocks, with {blocks} granted,")
        await p.release(request)
        await free(p, total)


@case(117, "Prompt tokens of Allocates that wait.")
async def load_counts_who_waits(d: DecodeHand) -> None:
    """Two Allocates wait for blocks: the load has their number and the sum of their prompts."""
    p = await d.prefill()
    await fill(d, p)
    waiting = [d.request(tokens) for tokens in (d.block_size, d.block_size + 1)]
    calls = [p.ask(request) for request in waiting]
    load = await queued(p, len(calls))
    expect_equal(load.queued_tokens, sum(len(r.prompt) for r in waiting), "queued_tokens")
    expect_equal(load.free_blocks, 0, "free_blocks")
    for call in calls:
        call.cancel()
    expect_equal((await queued(p, 0)).queued_tokens, 0, "queued_tokens, with nobody waiting,")


@case(
    118,
    "NOT_FOUND with LEASE_EXPIRED when P sent no heartbeat or read nothing for two"
    " heartbeats, or lets too much pile up unread",
)
async def a_silent_session_ends(d: DecodeHand) -> None:
    """P sends no heartbeat: its session lives for more than one period and ends after two."""
    p = d.new_prefill()
    began, period = time.monotonic(), d.times.heartbeat
    stream = await _welcomed(p)
    passed = time.monotonic() - began
    alive = "a session that lives for two heartbeats of silence"
    await stream.silent(max(0.0, 1.5 * period - passed), alive)
    await stream.refused(Reason.LEASE_EXPIRED, "no heartbeat for two periods", period + answer_s())


@case(119, "Each side takes a session on which it has heard nothing for two of them for broken.")
async def a_beating_session_lives(d: DecodeHand) -> None:
    """Heartbeats without grants, one in each period, keep a session beyond two periods."""
    stream = await _welcomed(d.new_prefill())
    for sequence in range(1, 4):
        await asyncio.sleep(0.75 * d.times.heartbeat)
        await _beat(stream, sequence)
        expect_equal(await _ack(stream), sequence, "the sequence of the ack")


@case(129, "Transfers being decoded.")
async def load_counts_who_decodes(d: DecodeHand) -> None:
    """A long answer is being decoded: the load counts it, and no more once its client has left."""
    p = await d.prefill()
    for _ in range(TRIES):
        load = await _load_amid_an_answer(d, p)
        if load is not None:
            break
    else:
        raise NotApplicable(f"each of {TRIES} answers was complete before D could be asked")
    expect_equal(load.decoding_requests, 1, "decoding_requests")
    await eventually(lambda: p.load_now(), lambda now: not now.decoding_requests, "no transfer")


async def _load_amid_an_answer(d: DecodeHand, p: KitPrefill) -> decode_pb2.Load | None:
    """D's load while it decodes the longest answer there is room for, which its client then leaves;
    None where that was complete already."""
    output = max(2, min(LONG_ANSWER, d.subject.room_tokens - 4 * d.block_size))
    sampling = sampling_pb2.SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    request = d.request(sampling=sampling)
    leg = d.generate(request)
    grant = await p.allocate(request)
    await p.first_token(request, grant, 1)
    await p.send_kv(request, grant)
    while len(leg.tokens) < 2:
        await leg.next()
    # A grant that was handed off is known while its transfer lives, and this one decodes.
    ack = await p.heartbeat(grant.grant_id)
    await p.heartbeat(grant.grant_id)
    await leg.leave()
    p.held.discard(grant.grant_id)
    return None if ack.unknown_grant_ids else p.load_with(ack)


async def _welcomed(p: KitPrefill) -> Stream:
    """A session on which nothing more is said, nor read but by the case."""
    stream = p.open_session()
    await stream.send(decode_pb2.SessionRequest(hello=p.hello()))
    first = await stream.read("welcome")
    expect(first.HasField("welcome"), "welcome as the first message", first)
    return stream


async def _beat(stream: Stream, sequence: int) -> None:
    beat = decode_pb2.Heartbeat(sequence=sequence)
    await stream.send(decode_pb2.SessionRequest(heartbeat=beat))


async def _ack(stream: Stream) -> int:
    """The sequence of the next ack; what else D pushes is passed over."""
    while True:
        message: decode_pb2.SessionResponse = await stream.read("the ack of a heartbeat")
        if message.HasField("heartbeat_ack"):
            return message.heartbeat_ack.sequence
