"""F32, F57, F58, F59, F63: P and D that lay KV out differently never meet, and D goes on only from
all of it.

F32: a P whose ranks do not add up to the model is turned away and told of the field; that those
which do give the right tokens is `tests/system/test_shards.py`'s to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import google_crc32c
import grpc.aio
import pytest

from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.layout import PlaneKind
from pd_grpc.protocol.messages import layout_to_proto
from pd_grpc.v1 import decode_pb2, decode_pb2_grpc, layout_pb2, transfer_pb2, types_pb2
from tests.decode.wire import RawPrefill, Wire, fault_of, tokens_of, wire
from tests.prefill.cluster import answer_to, request_to, running


async def _turned_away(d: Wire, **fields: Any) -> Fault:
    """What D answers to a Hello with these fields."""
    hello = decode_pb2.Hello(
        instance=types_pb2.Instance(name="odd", epoch=10, role=types_pb2.ROLE_PREFILL),
        layouts=[layout_to_proto(SimEngine(d.config).layout)],
    )
    for name, value in fields.items():
        hello.ClearField(name)
        getattr(hello, name).extend(value)
    session = decode_pb2_grpc.DecodeServiceStub(d.channel).Session()
    await session.write(decode_pb2.SessionRequest(hello=hello))
    return await fault_of(session)


@pytest.mark.parametrize(
    ("field", "shards"),
    [
        ("shards", [layout_pb2.Shard(tp_rank=rank, tp_size=3) for rank in range(2)]),
        ("shards", [layout_pb2.Shard(tp_size=2)]),
        ("shards[1].tp_rank", [layout_pb2.Shard(tp_size=2) for rank in range(2)]),
        ("shards[1].tp_size", [layout_pb2.Shard(tp_size=2), layout_pb2.Shard(tp_rank=1)]),
        ("shards[0].tp_rank", [layout_pb2.Shard(tp_rank=1)]),
        ("shards[0].head_count", [layout_pb2.Shard(head_count=1)]),
        ("shards", [layout_pb2.Shard(pp_size=2)]),
        ("shards[0].dp_size", [layout_pb2.Shard(dp_size=2)]),
    ],
)
async def test_ranks_are_read_from_the_shards_and_must_add_up(
    field: str, shards: list[layout_pb2.Shard]
) -> None:
    """F32, F59: no rank is ever taken from a name, an id or an order."""
    async with wire() as d:
        fault = await _turned_away(d, shards=shards)
        assert (fault.code, fault.reason) == (Code.FAILED_PRECONDITION, Reason.LAYOUT_MISMATCH)
        assert fault.metadata["field"] == field


async def test_names_and_ids_that_look_like_ranks_mean_nothing() -> None:
    """F59: every grant carries the shards with their ranks, whoever asks and however it is
    called."""
    async with wire() as d:
        for name, transfer_id in (("prefill-tp1", "17"), ("3", "rank:2-of-4"), ("p.dp7", "0")):
            p = await d.prefill(name)
            request = d.request(transfer_id=transfer_id)
            call = d.generate(request)
            grant = await p.allocate(request)
            for shard in (*grant.shards, *p.welcome.shards):
                assert (shard.tp_rank, shard.tp_size, shard.dp_rank) == (0, 1, 0)
                assert shard.endpoint
            token, chunks = p.compute(request)
            await p.first_token(request, grant.grant_id, token)
            await p.send_kv(request, grant, chunks)
            assert await tokens_of(call) == d.answer(request)


class OfInt8(SimEngine):
    """Has KV of as many bytes and of another dtype."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        (group,) = self.layout.groups
        planes = tuple(replace(plane, dtype="int8") for plane in group.planes)
        self.layout = replace(self.layout, groups=(replace(group, planes=planes),))


class OfTwoGroups(SimEngine):
    """Has its layers in two groups, and as many bytes a block."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        (group,) = self.layout.groups
        half = replace(group, layers=group.layers // 2)
        self.layout = replace(self.layout, groups=(half, half))


@pytest.mark.parametrize(
    ("engine", "field"),
    [(OfInt8, "layout.groups[0].planes[0].dtype"), (OfTwoGroups, "layout.groups")],
)
async def test_a_p_of_another_layout_with_as_many_bytes_is_refused_at_hello(
    engine: type[SimEngine], field: str
) -> None:
    """F57, F58: with both values named, before a block is granted; others are served."""
    async with running() as cluster:
        odd, p = await cluster.prefill(engine=engine), await cluster.prefill()
        d = await cluster.decode()
        assert odd.engine.layout.block_bytes == d.engine.layout.block_bytes
        fault = (await cluster.run_prefill(odd, request_to(d, tokens=3))).fault
        assert isinstance(fault, Fault)
        assert (fault.reason, fault.metadata["field"]) == (Reason.LAYOUT_MISMATCH, field)
        assert fault.metadata["ours"] != fault.metadata["theirs"]
        request = request_to(d)
        assert (await cluster.run(p, d, request))[1].tokens == answer_to(request)


Chunks = list[transfer_pb2.KvChunk]


def _without_last_layer(chunks: Chunks) -> Chunks:
    last = max((chunk.group, chunk.layer_start) for chunk in chunks)
    return [chunk for chunk in chunks if (chunk.group, chunk.layer_start) < last]


def _without_last_group(chunks: Chunks) -> Chunks:
    return [chunk for chunk in chunks if chunk.group == 0]


def _without_first_group(chunks: Chunks) -> Chunks:
    return [chunk for chunk in chunks if chunk.group > 0]


def _without_one_chunk(chunks: Chunks) -> Chunks:
    return chunks[:-1]


TWO_GROUPS: dict[str, Any] = {"sim_layout": "sliding-fp8-scale", "sim_window": 5}


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({}, _without_last_layer),
        ({}, _without_one_chunk),
        (TWO_GROUPS, _without_last_layer),
        (TWO_GROUPS, _without_one_chunk),
        (TWO_GROUPS, _without_last_group),
        (TWO_GROUPS, _without_first_group),
    ],
)
@pytest.mark.parametrize("length", [3, 40])
async def test_no_token_comes_from_kv_of_which_a_part_was_never_sent(
    length: int, settings: dict[str, Any], left_out: Callable[[Chunks], Chunks]
) -> None:
    """F58: short prompts and long ones alike; nothing but the first token is shown."""
    async with wire(**settings) as d:
        p = await d.prefill()
        request = d.request(prompt=list(range(100, 100 + length)))
        call = d.generate(request)
        grant = await p.allocate(request)
        token, chunks = p.compute(request)
        sent = left_out(chunks)
        assert sent
        await p.first_token(request, grant.grant_id, token)
        fault = await _send_and_end(p, request, grant, sent)
        assert fault.reason is Reason.BAD_REQUEST and "layer" in fault.message
        shown: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError):
            async for message in call:
                shown += message.token_ids
        assert shown == [token]


@pytest.mark.parametrize("length", [3, 40])
async def test_planes_and_blocks_that_no_token_needs_yet_are_needed_all_the_same(
    length: int,
) -> None:
    """F58: a chunk without its last plane, and a sliding group without what is out of its window,
    are no KV that a token could come of."""
    async with wire(**TWO_GROUPS) as d:
        p = await d.prefill()
        (scale,) = [x for x in p.engine.layout.groups[0].planes if x.kind is PlaneKind.SCALE]
        for bad in ("plane", "window"):
            request = d.request(prompt=list(range(100, 100 + length)))
            call = d.generate(request)
            grant = await p.allocate(request)
            token, chunks = p.compute(request)
            await p.first_token(request, grant.grant_id, token)
            if bad == "plane":
                stream = await p.open(request, grant)
                await stream.read()
                chunk = next(chunk for chunk in chunks if chunk.group == 0)
                lacks = scale.token_bytes * p.engine.layout.block_size * chunk.block_count
                chunk.payload = chunk.payload[:-lacks]
                chunk.crc32c = google_crc32c.value(chunk.payload)
                await stream.write(transfer_pb2.TransferRequest(chunk=chunk))
                fault = await fault_of(stream)
            else:
                sent = [c for c in chunks if c.group == 0 or c.block_start > 0]
                fault = await _send_and_end(p, request, grant, sent)
            assert fault.reason is Reason.BAD_REQUEST
            shown: list[int] = []
            with pytest.raises(grpc.aio.AioRpcError):
                async for message in call:
                    shown += message.token_ids
            assert shown == [token]


async def _send_and_end(
    p: RawPrefill, request: Any, grant: decode_pb2.AllocateResponse, chunks: Chunks
) -> Fault:
    """Send these chunks, say that this was all, and hear what is wrong with it."""
    stream = await p.open(request, grant)
    await stream.read()
    for chunk in chunks:
        await stream.write(transfer_pb2.TransferRequest(chunk=chunk))
        await stream.read()
    size = sum(len(chunk.payload) for chunk in chunks)
    end = transfer_pb2.TransferEnd(chunks=len(chunks), bytes=size)
    await stream.write(transfer_pb2.TransferRequest(end=end))
    return await fault_of(stream)


async def test_what_one_side_spells_out_and_the_other_leaves_out_is_the_same() -> None:
    """F63: a P of another version that says more, or less, of the same layout is taken in."""
    async with wire() as d:
        spelt_out = layout_to_proto(SimEngine(d.config).layout)
        bare = layout_pb2.KvLayout()
        bare.CopyFrom(spelt_out)
        bare.format = ""
        for group in bare.groups:
            group.kind = layout_pb2.KV_GROUP_KIND_UNSPECIFIED
        newer = spelt_out.SerializeToString() + b"\xfa\x3f\x03new"  # field 1023, of a later version
        for number, layout in enumerate((spelt_out, bare, layout_pb2.KvLayout.FromString(newer))):
            session = decode_pb2_grpc.DecodeServiceStub(d.channel).Session()
            name = types_pb2.Instance(name=f"p{number}", epoch=10, role=types_pb2.ROLE_PREFILL)
            whole = [layout_pb2.Shard(tp_size=number % 2)]
            hello = decode_pb2.Hello(instance=name, layouts=[layout], shards=whole)
            await session.write(decode_pb2.SessionRequest(hello=hello))
            welcome = (await session.read()).welcome
            assert welcome.session_id and welcome.layout == spelt_out
            session.cancel()
