"""D34x: P with two shards, each of which brings its half of the heads."""

from __future__ import annotations

from typing import Any

import google_crc32c

from pd_grpc.conformance.calls import check_field
from pd_grpc.conformance.case import NotApplicable, expect
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.decode.transfer import Transfer
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.layout import DTYPE_BYTES, KvLayout
from pd_grpc.protocol.messages import layout_from_proto
from pd_grpc.protocol.shards import cut, heads_of
from pd_grpc.v1 import decode_pb2, layout_pb2, transfer_pb2

ONCE = "Together the streams to one shard bring each layer and head that it holds once:"
LAST = (
    "likewise for layers and heads that the stream was not opened for, and for the last end to a"
    " shard of which some layer or head came on no stream;"
)


@case(343, ONCE)
async def two_shards_bring_their_halves(d: DecodeHand) -> None:
    """The halves come one after the other on two streams, in chunks of every layer. The answer
    follows from both."""
    h = await _granted_to_two(d)
    await h.first_token()
    for rank in (1, 0):
        transfer = await _open(h, rank)
        await transfer.opened()
        await transfer.send_all(_half(h, rank))
        await transfer.complete()
    await h.answers()


@case(344, "for sends that overlaps what another stream of the grant brings;")
async def what_comes_already(d: DecodeHand) -> None:
    """The second shard says that it brings what the first does, and is refused by the field's name;
    the transfer is as good as before."""
    h = await _granted_to_two(d, same=True)
    first = await _open(h, 0)
    await first.opened()
    second = await _open(h, 1)
    check_field(await second.refused(Reason.BAD_REQUEST, "what another stream brings"), "sends")
    await h.first_token()
    await first.send_all(h.kv())
    await first.complete()
    idle = await _open(h, 1, sends=layout_pb2.KvPart())
    await idle.opened()
    await idle.complete()
    await h.answers()


@case(345, LAST)
async def heads_that_nobody_brings(d: DecodeHand) -> None:
    """The first shard brings its half and the second says that it brings nothing: its end, the
    last, is refused, and no answer follows from half of the KV."""
    h = await _granted_to_two(d)
    first = await _open(h, 0)
    await first.opened()
    await first.send_all(_half(h, 0))
    await first.complete()
    second = await _open(h, 1, sends=layout_pb2.KvPart())
    await second.opened()
    await second.end()
    await second.refused(Reason.BAD_REQUEST, "half of the heads came on no stream")
    outcome = await h.leg.outcome()
    expect(outcome is not None, "a client that hears of it", outcome)
    expect(not h.leg.tokens, "no token", h.leg.tokens)


@case(346, "Unset means the only one.")
async def one_of_two_must_say_which(d: DecodeHand) -> None:
    """Open without a sender, where P has two, is refused by the field's name."""
    h = await _granted_to_two(d)
    transfer = await h.p.open(h.request, h.grant)
    check_field(await transfer.refused(Reason.BAD_REQUEST, "no sender"), "sender")
    await h.p.release(h.request)


async def _granted_to_two(d: DecodeHand, same: bool = False) -> HandOver:
    """A grant to a P with two shards: one for each half of the heads or, with `same`, two that hold
    all of them. NotApplicable where D takes no such P."""
    layout = d.subject.layout
    shards = [place.to_proto() for place in _places(layout)]
    if same:
        shards = [layout_pb2.Shard(tp_rank=rank, tp_size=2) for rank in range(2)]
    p = d.new_prefill()
    stream = p.open_session()
    await stream.offer(decode_pb2.SessionRequest(hello=p.hello(shards=shards)))
    if await stream.next("welcome, or LAYOUT_MISMATCH") is None:
        await stream.refused(Reason.LAYOUT_MISMATCH, "a P with two shards")
        raise NotApplicable("D does not take in a P with two shards")
    await p.join(shards=shards)
    h = await granted(d, p=p)
    expect(len(h.grant.shards) == 1, "one shard of D, as the kit takes D to have", h.grant)
    h.shards = shards
    return h


def _places(layout: KvLayout) -> Any:
    if heads_of(layout) % 2:
        raise NotApplicable("the heads of D's layout cannot be halved")
    return cut(layout, 2, 1)


async def _open(h: HandOver, rank: int, **fields: Any) -> Transfer:
    return await h.p.open(h.request, h.grant, sender=h.shards[rank], **fields)


def _half(h: HandOver, rank: int) -> list[transfer_pb2.KvChunk]:
    """All that D wants, of each plane the heads of one shard alone."""
    layout = layout_from_proto(h.p.welcome.layout)
    found = []
    for chunk in h.kv():
        whole, at, payload = chunk.payload, 0, b""
        for _ in range(chunk.block_count * chunk.layer_count):
            for plane in layout.groups[chunk.group].planes:
                size = plane.heads * plane.head_dim * DTYPE_BYTES[plane.dtype] * layout.block_size
                half = size // 2
                payload += whole[at + rank * half : at + (rank + 1) * half]
                at += size
        mine = transfer_pb2.KvChunk()
        mine.CopyFrom(chunk)
        mine.payload, mine.crc32c = payload, google_crc32c.value(payload)
        found.append(mine)
    return found
