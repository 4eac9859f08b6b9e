"""D35x and D36x: streams that stop, go on elsewhere, or end with their grant."""

from __future__ import annotations

from collections.abc import Iterable

from pd_grpc.conformance.case import answer_s, expect, expect_equal, quiet_s, soon_s
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.decode.transfer import Transfer
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import transfer_pb2

REOPENED = (
    "a stream that stops without it may be reopened while the grant lives, and opened then lists "
    "what D has."
)
CLOSED = (
    "A grant that ends closes its stream with the transfer's own end, such as RELEASED,"
    " CLIENT_GONE, LEASE_EXPIRED, PREFILL_LOST or STAGE_DEADLINE"
)


@case(350, REOPENED)
async def a_half_close_can_be_reopened(d: DecodeHand) -> None:
    """A stream is half-closed in the middle; another one sends the rest."""
    h, transfer, rest = await _half_sent(d)
    await transfer.stream.half_close()
    await transfer.stream.ended()
    await _finish(await h.receiving(), rest)
    await h.first_token()
    await h.answers()


@case(
    351,
    "Only end completes a stream, for a killed peer, a cancel and a half-close look the"
    " same to a reader",
)
async def a_cancelled_stream_can_be_reopened(d: DecodeHand) -> None:
    """A stream is cancelled and its connection closed; another one sends the rest."""
    h, transfer, rest = await _half_sent(d)
    await transfer.leave()
    await _finish(await h.receiving(), rest)
    await h.first_token()
    await h.answers()


@case(352, "P need not send it again.")
async def opened_lists_what_was_acknowledged(d: DecodeHand) -> None:
    """The ranges of opened on a second stream are those acknowledged on the first, no others."""
    h, transfer, rest = await _half_sent(d)
    sent = _cells(h.kv()[: -len(rest)])
    await transfer.stream.half_close()
    await transfer.stream.ended()
    again = await h.p.open(h.request, h.grant)
    verified = (await again.opened()).verified
    expect_equal(sorted(_cells(verified)), sorted(sent), "verified, as (group, layer, block),")
    await _finish(again, rest)
    await h.first_token()
    await h.answers()


@case(
    353,
    "Only end completes a stream, for a killed peer, a cancel and a half-close look the"
    " same to a reader",
)
async def everything_came_but_no_end(d: DecodeHand) -> None:
    """D has all KV and the first token; without end it decodes nothing."""
    h = await granted(d)
    await h.first_token()
    await h.leg.next()
    transfer = await h.receiving()
    await transfer.send_all(h.kv())
    await transfer.stream.half_close()
    await transfer.stream.ended()
    await h.leg.shows_nothing(quiet_s(), "no second token before end has come")
    await _finish(await h.receiving(), [])
    await h.answers()


@case(354, "0 when an earlier stream had sent everything.")
async def nothing_is_left_to_send(d: DecodeHand) -> None:
    """The first stream sent everything but end; the second ends with sums of 0."""
    h = await granted(d)
    transfer = await h.receiving()
    await transfer.send_all(h.kv())
    await transfer.leave()
    await _finish(await h.receiving(), [])
    await h.first_token()
    await h.answers()


@case(
    355,
    "ABORTED with SUPERSEDED ends a stream that a newer stream of the same two shards has taken"
    " over, and it alone.",
)
async def a_newer_stream_takes_over(d: DecodeHand) -> None:
    """A second stream is opened beside the first, which ends; the second completes."""
    h, transfer, rest = await _half_sent(d)
    newer = await h.receiving()
    await transfer.refused(Reason.SUPERSEDED, "a newer stream took over")
    await _finish(newer, rest)
    await h.first_token()
    await h.answers()


@case(356, CLOSED)
async def released(d: DecodeHand) -> None:
    """P gives the transfer back while its stream is open."""
    h, transfer, _ = await _half_sent(d)
    await h.p.release(h.request)
    await transfer.refused(Reason.RELEASED, "the transfer was given back")


@case(357, CLOSED)
async def prefill_lost(d: DecodeHand) -> None:
    """P says goodbye while its stream is open."""
    h, transfer, _ = await _half_sent(d)
    await h.p.goodbye()
    await transfer.refused(Reason.PREFILL_LOST, "P said goodbye")
    await h.leg.fails(Reason.PREFILL_LOST, "P said goodbye")


@case(358, CLOSED)
async def budget_over(d: DecodeHand) -> None:
    """The budget ends while the stream is open."""
    budget = soon_s()
    h = await granted(d, budget=duration(budget))
    limit = budget + answer_s()
    transfer = await h.receiving()
    fault = await transfer.refused(Reason.STAGE_DEADLINE, "the budget is over", limit)
    expect_equal(fault.metadata.get("stage"), "transfer", "the stage")
    await h.leg.fails(Reason.STAGE_DEADLINE, "the budget is over")


@case(359, CLOSED)
async def client_gone(d: DecodeHand) -> None:
    """The client leaves while the stream is open."""
    h, transfer, _ = await _half_sent(d)
    await h.leg.leave()
    await transfer.refused(Reason.CLIENT_GONE, "the client left")


@case(
    360,
    "A half-close without end ends the call with OK, after the acks that are on their way.",
)
async def a_half_close_ends_the_call(d: DecodeHand) -> None:
    """A stream that has sent everything is half-closed without end: the last ack comes, then OK and
    no completed. Another one has nothing to send, and its end completes the transfer."""
    h = await granted(d)
    transfer = await h.receiving()
    *most, last = h.kv()
    await transfer.send_all(most)
    await transfer.send(last)
    await transfer.stream.half_close()
    await transfer.acknowledged(transfer.bytes)
    more = await transfer.stream.next("the end of the stream")
    expect(more is None, "nothing after the acks", more)
    await transfer.stream.fine("it was half-closed without end")
    again = await h.receiving()
    await again.complete()
    await h.first_token()
    await h.answers()


async def _half_sent(d: DecodeHand) -> tuple[HandOver, Transfer, list[transfer_pb2.KvChunk]]:
    """A stream that has brought half of its chunks, and the other half."""
    h = await granted(d)
    transfer = await h.receiving()
    pieces = h.kv()
    half = max(1, len(pieces) // 2)
    await transfer.send_all(pieces[:half])
    return h, transfer, pieces[half:]


async def _finish(transfer: Transfer, rest: list[transfer_pb2.KvChunk]) -> None:
    await transfer.send_all(rest)
    await transfer.complete()


def _cells(
    ranges: Iterable[transfer_pb2.KvRange | transfer_pb2.KvChunk],
) -> set[tuple[int, int, int]]:
    """(group, layer, block) for all that ranges cover."""
    return {
        (r.group, layer, block)
        for r in ranges
        for layer in range(r.layer_start, r.layer_start + r.layer_count)
        for block in range(r.block_start, r.block_start + r.block_count)
    }
