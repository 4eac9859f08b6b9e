"""Reading what D granted, and what each of its shards is to get."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.prefill.carriers import INLINE_ALONE, Carriers
from pd_grpc.prefill.states import Grant, PrefillRecord
from pd_grpc.prefill.strands import plan_strands
from pd_grpc.protocol.endpoints import check_endpoint
from pd_grpc.protocol.layout import CANONICAL, KvLayout
from pd_grpc.protocol.messages import INLINE
from pd_grpc.protocol.shards import Place, places_of, shards_problem
from pd_grpc.transport.base import LayerRun, SendPlan
from pd_grpc.v1 import decode_pb2, types_pb2


def read_grant(
    endpoint: str,
    decode: types_pb2.Instance,
    response: decode_pb2.AllocateResponse,
    senders: Sequence[Place],
    layout: KvLayout,
) -> Grant:
    """The grant in an Allocate's answer, to be sent by our shards `senders`."""
    # Shards that do not fit have no strands; `grant_problem` says so.
    fit = response.shards and shards_problem(response.shards, layout) is None
    receivers = places_of(response.shards, layout) if fit else ()
    return Grant(
        endpoint,
        decode,
        response.grant_id,
        tuple((wanted.start, wanted.count) for wanted in response.wanted),
        tuple(response.shards),
        response.transport,
        response.cached_tokens,
        plan_strands(senders, receivers),
        response.kv_format or CANONICAL,
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
    wrong_format = format_problem(grant.kv_format, grant.transport, layout)
    if wrong_format is not None:
        return wrong_format
    end = 0
    blocks = layout.blocks_for(len(record.tokens))
    for start, count in grant.wanted:
        if count < 1 or start < end or start + count > blocks:
            return f"wanted blocks [{start}, {start + count}) of {blocks}"
        end = start + count
    if not grant.shards:
        return "it has no shards"
    for i, shard in enumerate(grant.shards):
        try:
            check_endpoint(shard.endpoint)
        except ValueError as error:
            return f"shards[{i}].endpoint: {error}"
    problem = shards_problem(grant.shards, layout)
    if problem is not None:
        return f"{problem.field}: {problem.theirs}, not {problem.ours}"
    return None


def format_problem(kv_format: str, transport: int, layout: KvLayout) -> str | None:
    """What keeps us from sending bytes of this format by this transport, if anything."""
    if kv_format not in (CANONICAL, layout.format):
        return f"kv_format {kv_format} is neither canonical nor ours, which is {layout.format}"
    if kv_format != layout.format and transport not in INLINE:
        return f"kv_format {kv_format} goes inline alone: ours is {layout.format}"
    return None


def send_plan(grant: Grant, strand: int, record: PrefillRecord, layout: KvLayout) -> SendPlan:
    """What goes over one strand of a request that has its blocks."""
    assert record.holding is not None
    part = grant.strands[strand].part
    return SendPlan(
        tokens=len(record.tokens),
        block_table=tuple(record.holding.blocks),
        wanted=grant.wanted,
        layers=tuple(LayerRun(*run) for run in part.runs(layout)),
        ready=record.computed,
        heads=part.heads,
    )


def strand_bytes(grant: Grant, strand: int, blocks: int, layout: KvLayout) -> int:
    """Bytes that go over one strand of the first `blocks` logical blocks."""
    block_bytes = grant.strands[strand].part.block_bytes(layout)
    wanted = sum(max(0, min(start + count, blocks) - start) for start, count in grant.wanted)
    return wanted * block_bytes
