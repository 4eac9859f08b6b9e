"""Reading what D granted, and what each of its shards is to get."""

from __future__ import annotations

from pd_grpc.prefill.carriers import INLINE_ALONE, Carriers
from pd_grpc.prefill.states import Grant, PrefillRecord
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.transport.base import LayerRun, SendPlan
from pd_grpc.v1 import decode_pb2, layout_pb2, types_pb2


def read_grant(
    endpoint: str, decode: types_pb2.Instance, response: decode_pb2.AllocateResponse
) -> Grant:
    """The grant in an Allocate's answer."""
    return Grant(
        endpoint,
        decode,
        response.grant_id,
        tuple((wanted.start, wanted.count) for wanted in response.wanted),
        tuple(response.shards),
        response.transport,
        response.cached_tokens,
    )


def grant_problem(
    grant: Grant, record: PrefillRecord, layout: KvLayout, carriers: Carriers = INLINE_ALONE
) -> str | None:
    """What makes a grant useless to us, if anything."""
    if not grant.grant_id:
        return "it has no grant_id"
    if not record.kv_needed:
        return None
    if not carriers.has(grant.transport):
        return f"transport {grant.transport} was not offered"
    end = 0
    blocks = layout.blocks_for(len(record.tokens))
    for start, count in grant.wanted:
        if count < 1 or start < end or start + count > blocks:
            return f"wanted blocks [{start}, {start + count}) of {blocks}"
        end = start + count
    if not grant.shards:
        return "it has no shards"
    for i, shard in enumerate(grant.shards):
        problem = _shard_problem(shard, layout)
        if problem is not None:
            return f"shards[{i}]: {problem}"
    return None


def send_plan(grant: Grant, shard: int, record: PrefillRecord, layout: KvLayout) -> SendPlan:
    """What one shard is to get of a request that has its blocks."""
    assert record.holding is not None
    return SendPlan(
        tokens=len(record.tokens),
        block_table=tuple(record.holding.blocks),
        wanted=grant.wanted,
        layers=_layers_of(grant.shards[shard], layout),
        ready=record.computed,
    )


def shard_bytes(grant: Grant, shard: int, blocks: int, layout: KvLayout) -> int:
    """Bytes that one shard is to get of the first `blocks` logical blocks."""
    runs = _layers_of(grant.shards[shard], layout)
    block_bytes = sum(layout.layer_bytes(run.group) * run.layers for run in runs)
    wanted = sum(max(0, min(start + count, blocks) - start) for start, count in grant.wanted)
    return wanted * block_bytes


def _layers_of(shard: layout_pb2.Shard, layout: KvLayout) -> tuple[LayerRun, ...]:
    """The layers a shard holds; it counts them over all groups, we within each."""
    runs: list[LayerRun] = []
    first = shard.layer_start
    last = first + shard.layer_count if shard.layer_count else _layers(layout)
    before = 0
    for g, group in enumerate(layout.groups):
        start, end = max(first, before), min(last, before + group.layers)
        if start < end:
            runs.append(LayerRun(g, start - before, end - start))
        before += group.layers
    return tuple(runs)


def _shard_problem(shard: layout_pb2.Shard, layout: KvLayout) -> str | None:
    if not shard.endpoint:
        return "it has no endpoint"
    for size in ("tp_size", "pp_size", "cp_size", "dp_size"):
        if getattr(shard, size) > 1:
            return f"{size} {getattr(shard, size)} is not supported"
    if shard.head_start or shard.head_count:
        return "a range of heads is not supported"
    if shard.layer_start + shard.layer_count > _layers(layout):
        return f"layers [{shard.layer_start}, {shard.layer_start + shard.layer_count})"
    return None


def _layers(layout: KvLayout) -> int:
    return sum(group.layers for group in layout.groups)
