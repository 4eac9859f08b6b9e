"""D30x to D32x: KV in, acknowledgements out, on one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pd_grpc.conformance.calls import check_fault, check_feature
from pd_grpc.conformance.case import NotApplicable, expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.kv import chunk
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.v1 import layout_pb2, transfer_pb2, types_pb2

BOUNDS = (
    "INVALID_ARGUMENT with BAD_REQUEST for a range out of bounds, a payload of another size"
    " than its range, more bytes than the window, an end whose sums are wrong or that comes"
    " before every wanted range has"
)


@case(301, "P sends open, waits for opened, then sends any number of chunks in any order, and end")
async def chunks_come_in_any_order(d: DecodeHand) -> None:
    """The last layer's last block is sent first, one block to a chunk; the answer is right."""
    h = await granted(d)
    transfer = await h.receiving()
    wanted = range(d.subject.layout.blocks_for(len(h.request.tokens)))
    await transfer.send_all(d.rule.chunks(h.request.tokens, wanted, per_chunk=1)[::-1])
    await transfer.complete()
    await h.first_token()
    await h.answers()


@case(302, "What it has verified already of what this stream brings; empty on a first stream.")
async def a_first_stream_has_nothing_verified(d: DecodeHand) -> None:
    """The first stream of a grant is opened with no verified range."""
    h = await granted(d)
    opened = await (await h.p.open(h.request, h.grant)).opened()
    expect_equal(list(opened.verified), [], "verified, on a first stream,")
    await h.completes()


@case(303, "The ranges, one per accepted chunk since the last ack.")
async def acks_name_what_was_sent(d: DecodeHand) -> None:
    """Every chunk is acknowledged by its own range, and accepted_bytes adds up."""
    h = await granted(d)
    transfer = await h.receiving()
    for piece in h.kv():
        await transfer.send(piece)
        ack = await transfer.ack()
        expect_equal(list(ack.ranges), [_range(piece)], "ranges")
        expect_equal(ack.accepted_bytes, transfer.bytes, "accepted_bytes")
    await transfer.complete()
    await h.first_token()
    await h.answers()


@case(304, "One chunk may always be under way, however large")
async def a_chunk_larger_than_the_window(d: DecodeHand) -> None:
    """All KV comes in one chunk that is larger than the window."""
    d.needs_blocks(4)
    h = await granted(d, d.request(3 * d.block_size))
    transfer = await h.p.open(h.request, h.grant)
    window = (await transfer.opened()).window_bytes
    whole = d.rule.piece(h.request.tokens, _all_layers(d), range(3))
    if len(whole.payload) <= window:
        raise NotApplicable(f"the window of {window} bytes has room for every chunk of the case")
    await transfer.send_all([whole, *_other_groups(d, h, range(3))])
    await transfer.complete()
    await h.first_token()
    await h.answers()


@case(
    305,
    "layer, then plane, then head, then token, then dimension, as layout.proto defines"
    " them, without padding.",
)
async def several_layers_to_a_chunk(d: DecodeHand) -> None:
    """Chunks carry several layers of several blocks; the answer is right."""
    d.needs_blocks(4)
    request = d.request(3 * d.block_size + 1)
    d.answer(request)
    h = await granted(d, request)
    transfer = await h.receiving()
    layers = _all_layers(d)
    middle = max(1, len(layers) // 2)
    for part in (layers[:middle], layers[middle:]):
        for blocks in (range(2), range(2, 4)):
            if part:
                await transfer.send_all([d.rule.piece(h.request.tokens, part, blocks)])
    await transfer.send_all(_other_groups(d, h, range(4)))
    await transfer.complete()
    await h.first_token()
    await h.answers()


@case(306, "D acknowledges a range only when it is written and verified.")
async def a_corrupt_chunk_is_never_acknowledged(d: DecodeHand) -> None:
    """A chunk with one bit turned gets no ack, and ends stream and transfer."""

    def turn_a_bit(piece: transfer_pb2.KvChunk) -> None:
        piece.payload = bytes([piece.payload[0] ^ 1]) + piece.payload[1:]

    h, _ = await _spoilt(d, turn_a_bit, Reason.KV_CORRUPT)
    await h.leg.fails(Reason.KV_CORRUPT, "the KV came corrupt")


@case(307, "0 is a checksum like any other: it is always compared.")
async def a_checksum_of_zero_is_compared(d: DecodeHand) -> None:
    """A chunk whose checksum is left 0 is corrupt."""

    def leave_out(piece: transfer_pb2.KvChunk) -> None:
        piece.crc32c = 0

    await _spoilt(d, leave_out, Reason.KV_CORRUPT)


@case(308, BOUNDS)
async def layers_beyond_the_group(d: DecodeHand) -> None:
    """A chunk of the layer after the last is refused."""

    def beyond(piece: transfer_pb2.KvChunk) -> None:
        piece.layer_start = d.subject.layout.groups[piece.group].layers

    await _spoilt(d, beyond, Reason.BAD_REQUEST)


@case(309, "First logical block; must lie within the ranges D wanted.")
async def blocks_beyond_those_wanted(d: DecodeHand) -> None:
    """A chunk of the block after the last is refused."""

    def beyond(piece: transfer_pb2.KvChunk) -> None:
        piece.block_start += 1

    await _spoilt(d, beyond, Reason.BAD_REQUEST)


@case(310, "Index into KvLayout.groups, from 0.")
async def a_group_that_is_none(d: DecodeHand) -> None:
    """A chunk of the group after the last is refused."""

    def beyond(piece: transfer_pb2.KvChunk) -> None:
        piece.group = len(d.subject.layout.groups)

    await _spoilt(d, beyond, Reason.BAD_REQUEST)


@case(311, "Layers, at least 1.")
async def no_layers(d: DecodeHand) -> None:
    """A chunk of no layers and no bytes is refused."""

    def empty(piece: transfer_pb2.KvChunk) -> None:
        piece.CopyFrom(chunk(0, 0, 0, 1, b""))
        piece.layer_count = 0

    await _spoilt(d, empty, Reason.BAD_REQUEST)


@case(312, "Blocks, at least 1.")
async def no_blocks(d: DecodeHand) -> None:
    """A chunk of no blocks and no bytes is refused."""

    def empty(piece: transfer_pb2.KvChunk) -> None:
        piece.CopyFrom(chunk(0, 0, 0, 0, b""))

    await _spoilt(d, empty, Reason.BAD_REQUEST)


@case(
    313,
    "With L = layer_count and B = bytes of one block in one layer of the group, these heads"
    " alone, it has exactly block_count * L * B bytes.",
)
async def a_payload_of_another_size(d: DecodeHand) -> None:
    """A chunk with a byte too many, and the checksum of what it has, is refused."""

    def lengthen(piece: transfer_pb2.KvChunk) -> None:
        piece.CopyFrom(chunk(0, 0, piece.block_start, piece.block_count, piece.payload + b"\0"))

    await _spoilt(d, lengthen, Reason.BAD_REQUEST)


@case(314, "The client hears BAD_REQUEST as INTERNAL, for it is P's.")
async def the_client_hears_internal(d: DecodeHand) -> None:
    """What P did wrong is no fault of the client's request."""

    def beyond(piece: transfer_pb2.KvChunk) -> None:
        piece.block_start += 1

    h, _ = await _spoilt(d, beyond, Reason.BAD_REQUEST)
    fault = await h.leg.stream.outcome()
    check_fault(fault, Reason.BAD_REQUEST, "P's fault, as its client hears it", Code.INTERNAL)


@case(315, BOUNDS)
async def an_end_with_wrong_sums(d: DecodeHand) -> None:
    """Everything has come, and end says one chunk more."""
    h = await granted(d)
    transfer = await h.receiving()
    await transfer.send_all(h.kv())
    await transfer.end(chunks=transfer.chunks + 1)
    await transfer.refused(Reason.BAD_REQUEST, "the sums of end are wrong")
    await _ended_for_all(h)


@case(316, BOUNDS)
async def an_end_before_everything_came(d: DecodeHand) -> None:
    """The last chunk is missing when end comes."""
    h = await granted(d)
    transfer = await h.receiving()
    await transfer.send_all(h.kv()[:-1])
    await transfer.end()
    await transfer.refused(Reason.BAD_REQUEST, "a wanted range has not come")
    await _ended_for_all(h)


@case(317, "UNIMPLEMENTED with FEATURE for a descriptor on an INLINE stream")
async def a_descriptor_in_place_of_bytes(d: DecodeHand) -> None:
    """A chunk that says where its bytes are is refused by name."""

    def describe(piece: transfer_pb2.KvChunk) -> None:
        piece.ClearField("payload")
        piece.crc32c = 0
        piece.descriptor.CopyFrom(layout_pb2.MemoryDescriptor())

    _, fault = await _spoilt(d, describe, Reason.FEATURE)
    check_feature(fault, "chunk.descriptor")


@case(318, "FAILED_PRECONDITION with WRONG_STATE for a second open.")
async def a_second_open(d: DecodeHand) -> None:
    """Open comes twice on a stream; the transfer fails with it."""
    h = await granted(d)
    transfer = await h.receiving()
    await transfer.offer_open(h.request.ref, h.p.welcome.session_id, h.grant.grant_id)
    await transfer.refused(Reason.WRONG_STATE, "open came twice")
    await _ended_for_all(h)


@case(319, "An identical range again is acknowledged, not refused")
async def a_range_comes_again(d: DecodeHand) -> None:
    """Every chunk is sent twice and acknowledged twice; the answer is right."""
    h = await granted(d)
    transfer = await h.receiving()
    for piece in h.kv():
        expect_equal(await transfer.send_all([piece]), [_range(piece)], "ranges")
        expect_equal(await transfer.send_all([piece]), [_range(piece)], "ranges, of it again,")
    await transfer.complete()
    await h.first_token()
    await h.answers()


@case(
    320,
    "what is verified already is not written a second time, and a chunk that brings nothing"
    " new renews nothing.",
)
async def what_is_verified_stays(d: DecodeHand) -> None:
    """A verified range comes again with other bytes; the answer is that of the first ones."""
    request = d.request()
    d.answer(request)
    h = await granted(d, request)
    transfer = await h.receiving()
    pieces = h.kv()
    await transfer.send_all(pieces)
    other = pieces[0]
    payload = bytes(byte ^ 0xFF for byte in other.payload)
    await transfer.send_all([chunk(0, 0, other.block_start, other.block_count, payload)])
    await transfer.complete()
    await h.first_token()
    await h.answers()


@case(321, "An accepted chunk renews its grant.")
async def chunks_renew_the_grant(d: DecodeHand) -> None:
    """Chunks trickle in for longer than a lease, and no heartbeat lists the grant."""
    h = await granted(d, d.request(2 * d.block_size), hold=False)
    transfer = await h.receiving()
    pieces = d.rule.chunks(h.request.tokens, range(2), per_chunk=1)
    if len(pieces) < 4:
        raise NotApplicable("the layout has too few layers for chunks that outlast a lease")
    for piece in pieces[:4]:
        await asyncio.sleep(0.4 * d.times.lease)
        await transfer.send_all([piece])
    await transfer.send_all(pieces[4:])
    await transfer.complete()
    await h.first_token()
    await h.answers()


@case(
    322,
    "what is verified already is not written a second time, and a chunk that brings nothing"
    " new renews nothing.",
)
async def repeated_chunks_renew_nothing(d: DecodeHand) -> None:
    """The same chunk comes again and again, and the lease ends all the same."""
    h = await granted(d, hold=False)
    transfer = await h.receiving()
    piece = h.kv()[0]
    await transfer.send_all([piece])
    for _ in range(4):
        await asyncio.sleep(0.4 * d.times.lease)
        await transfer.offer(piece)
    await transfer.refused(Reason.LEASE_EXPIRED, "the lease has ended", 0.4 * d.times.lease)
    await h.leg.fails(Reason.LEASE_EXPIRED, "the lease ended")


@case(
    323,
    "A transfer of this P ended on D before hand-off, and no Allocate waits that would say so.",
)
async def the_session_hears_of_a_failed_transfer(d: DecodeHand) -> None:
    """After a corrupt chunk the session says so as well: which transfer, why, and its end."""

    def spoil(piece: transfer_pb2.KvChunk) -> None:
        piece.crc32c ^= 1

    h, _ = await _spoilt(d, spoil, Reason.KV_CORRUPT)
    ended = await h.p.told_of(h.request, "transfer_ended for the failed transfer")
    expect_equal(ended.state, types_pb2.TRANSFER_STATE_FAILED, "state")
    expect_equal(ended.status.code, int(Code.DATA_LOSS), "status.code")


@case(324, "Grants are received side by side, each on a stream of its own.")
async def transfers_run_side_by_side(d: DecodeHand) -> None:
    """Four transfers send their chunks in turn, and every answer is right."""
    d.needs_blocks(8)
    p = await d.prefill()
    hs = [await granted(d, p=p) for _ in range(4)]
    transfers = [await h.receiving() for h in hs]
    for pieces in zip(*(h.kv() for h in hs), strict=True):
        for transfer, piece in zip(transfers, pieces, strict=True):
            await transfer.send_all([piece])
    for h, transfer in zip(hs, transfers, strict=True):
        await transfer.complete()
        await h.first_token()
    for h in hs:
        await h.answers()


async def _spoilt(
    d: DecodeHand, spoil: Callable[[transfer_pb2.KvChunk], None], reason: Reason
) -> tuple[HandOver, Fault]:
    """A hand-over whose last chunk was wrong, which ended it: no ack, and the stream's fault."""
    h = await granted(d)
    transfer = await h.receiving()
    *right, wrong = h.kv()
    await transfer.send_all(right)
    spoil(wrong)
    await transfer.offer(wrong)
    came = await transfer.stream.next("the end of the stream")
    expect(came is None, "no ack of a chunk that is wrong", came)
    fault = await transfer.refused(reason, "the chunk is wrong")
    await _ended_for_all(h)
    return h, fault


async def _ended_for_all(h: HandOver) -> None:
    """D has failed the transfer: its client is told, and so is P when it asks."""
    ended = await h.leg.ends()
    expect(ended != "OK" and not h.leg.tokens, "no answer from KV that failed", ended)
    expect_equal(await h.p.release(h.request), types_pb2.TRANSFER_STATE_FAILED, "the state")


def _range(piece: transfer_pb2.KvChunk) -> transfer_pb2.KvRange:
    return transfer_pb2.KvRange(
        group=piece.group,
        layer_start=piece.layer_start,
        layer_count=piece.layer_count,
        block_start=piece.block_start,
        block_count=piece.block_count,
    )


def _other_groups(d: DecodeHand, h: HandOver, blocks: range) -> list[transfer_pb2.KvChunk]:
    """Chunks of the groups behind the first, all layers of each in one."""
    return [
        d.rule.piece(h.request.tokens, range(group.layers), blocks, group=g)
        for g, group in enumerate(d.subject.layout.groups)
        if g
    ]


def _all_layers(d: DecodeHand) -> range:
    return range(d.subject.layout.groups[0].layers)
