"""A P of stock stubs, cut over eight ranks, sends to our D of two: heads are cut here by hand."""

from __future__ import annotations

from collections.abc import Sequence

import google_crc32c
import grpc.aio
import pytest

from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.v1 import layout_pb2, transfer_pb2
from tests.decode.wire import RawPrefill, Wire, fault_of, tokens_of, wire

HEADS, RANKS = 4, 8
"""Two ranks of P hold each head."""
SHARDS = [
    layout_pb2.Shard(tp_rank=rank, tp_size=RANKS, head_start=rank // 2, head_count=1)
    for rank in range(RANKS)
]


def with_head(
    layout: layout_pb2.KvLayout, chunks: Sequence[transfer_pb2.KvChunk], head: int, named: bool
) -> list[transfer_pb2.KvChunk]:
    """Chunks of one layer each, cut to one head: in every plane of every block it is one run."""
    found = []
    for chunk in chunks:
        planes = layout.groups[chunk.group].planes
        assert {(plane.dtype, plane.heads) for plane in planes} == {("uint8", HEADS)}
        size = layout.block_size * planes[0].head_dim
        rows = range(head * size, len(chunk.payload), HEADS * size)
        payload = b"".join(chunk.payload[at : at + size] for at in rows)
        cut = transfer_pb2.KvChunk()
        cut.CopyFrom(chunk)
        cut.payload, cut.crc32c = payload, google_crc32c.value(payload)
        if named:
            cut.head_start, cut.head_count = head, 1
        found.append(cut)
    return found


async def handed_over(d: Wire, p: RawPrefill, named: bool, spoil: bool = False) -> None:
    """Each head goes from the second of the two ranks that hold it; the first sends nothing."""
    request = d.request(prompt=list(range(100, 113)))
    call = d.generate(request)
    grant = await p.allocate(request)
    assert [(s.tp_rank, s.head_start, s.head_count) for s in grant.shards] == [
        (0, 0, 2),
        (1, 2, 2),
    ]
    token, chunks = p.compute(request)
    await p.first_token(request, grant.grant_id, token)
    layout = p.welcome.layout
    for rank, sender in enumerate(SHARDS):
        head = rank // 2
        opening = {"shard": head // 2, "sender": sender}
        if rank % 2 == 0:
            await p.send_kv(request, grant, [], **opening, sends=layout_pb2.KvPart())
            continue
        brought = with_head(layout, chunks, head, named)
        if spoil and rank == RANKS - 1:
            brought[-1].head_start, brought[-1].head_count = head - 1, 1
            with pytest.raises(grpc.aio.AioRpcError, match="heads"):
                await p.send_kv(request, grant, brought, **opening)
            break
        await p.send_kv(request, grant, brought, **opening)
    if spoil:
        fault = await fault_of(call)
        assert isinstance(fault, Fault)
        assert (fault.code, fault.reason) == (Code.INTERNAL, Reason.BAD_REQUEST)
        ended = await p.told_of(request)
        assert ended.ref == request.ref
    else:
        assert await tokens_of(call) == d.answer(request)


@pytest.mark.parametrize("named", [False, True])
async def test_heads_come_from_stock_stubs(named: bool) -> None:
    """F32: whether the chunks name their heads or leave that to open."""
    async with wire(tp=2, sim_heads=HEADS) as d:
        await handed_over(d, await d.prefill(shards=SHARDS), named)


async def test_another_head_at_the_very_end_fails_the_whole() -> None:
    async with wire(tp=2, sim_heads=HEADS) as d:
        p = await d.prefill(shards=SHARDS)
        await handed_over(d, p, True, spoil=True)
        await handed_over(d, p, True)
