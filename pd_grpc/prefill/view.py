"""A request on P as an operator and its caller see it."""

from __future__ import annotations

from pd_grpc.prefill.prepare import LaneView
from pd_grpc.prefill.states import PrefillRecord, PrefillState, Stream, Times
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import admin_pb2, prefill_pb2, types_pb2

_WAITS_FOR = {
    PrefillState.QUEUED: "its turn to ask the decode instance for blocks",
    PrefillState.ALLOCATING: "blocks of the decode instance",
    PrefillState.PREPARED: "the engine",
    PrefillState.COMPUTING: "the engine",
}
_HOLDERS = {
    PrefillState.QUEUED: "the caller's stream",
    PrefillState.ALLOCATING: "an Allocate call",
    PrefillState.PREPARED: "the grant's lease",
    PrefillState.COMPUTING: "the engine",
    PrefillState.SENDING: "the grant's lease",
}


def stage_of(record: PrefillRecord) -> str:
    """The stage that spends the request's time, as STAGE_DEADLINE names it."""
    if record.state is PrefillState.ALLOCATING:
        return "allocate"
    if record.state is PrefillState.COMPUTING:
        return "compute"
    if record.state is PrefillState.SENDING:
        return "transfer" if record.first_token_delivered else "first_token"
    return "queue"


def describe(
    record: PrefillRecord, now: float, timer: tuple[str, float] | None = None
) -> admin_pb2.TransferInfo:
    """`timer` is the next timer that concerns it: its name, and when it fires."""
    ref = record.key.ref(0 if record.grant is None else record.grant.decode.epoch)
    info = admin_pb2.TransferInfo(
        ref=ref,
        request_id=record.request.request_id,
        state=record.state.wire,
        age=duration(now - record.times.called),
        state_age=duration(now - record.state_since),
        holder=_HOLDERS.get(record.state, ""),
        blocks=len(record.holding.blocks) if record.holding is not None else 0,
        waits_for=_waits_for(record),
        peer=record.grant.decode.name if record.grant is not None else record.target.name,
        prompt_tokens=len(record.request.token_ids),
        generated_tokens=len(record.request.generated_token_ids) + (record.first_token is not None),
    )
    if record.request.HasField("scope"):
        info.scope.CopyFrom(record.request.scope)
    if timer is not None:
        info.next_timer, at = timer
        info.next_timer_in.CopyFrom(duration(at - now))
    if record.fault is not None:
        info.last_error.CopyFrom(record.fault.status())
    return info


def lane_info(lane: LaneView) -> admin_pb2.PrepareLane:
    """One D in the prepare pool."""
    info = admin_pb2.PrepareLane(
        decode=lane.endpoint,
        in_flight=lane.in_flight,
        ready=lane.ready,
        waiting=lane.waiting,
        backoff_left=duration(lane.backoff_left_s),
        breaker=f"BREAKER_STATE_{lane.breaker.name}",
        breaker_left=duration(lane.breaker_left_s),
    )
    if lane.breaker_fault is not None:
        info.breaker_fault.CopyFrom(lane.breaker_fault.status())
    return info


def _waits_for(record: PrefillRecord) -> str:
    if record.state is PrefillState.SENDING:
        if not record.first_token_delivered:
            return "the decode instance's answer to the first token"
        return "acknowledgement of the KV" + _by_shards(record)
    return _WAITS_FOR.get(record.state, "")


def _by_shards(record: PrefillRecord) -> str:
    """Of several shards of D, those that have not got all of theirs."""
    grant = record.grant
    if grant is None or len(grant.shards) == 1:
        return ""
    open_ones = [n for n, stream in record.streams.items() if stream is not Stream.COMPLETED]
    lacking = sorted({grant.strands[n].receiver for n in open_ones})
    return f" by shard {', '.join(map(str, lacking))} of {len(grant.shards)}"


def handed_off(record: PrefillRecord) -> prefill_pb2.HandedOff:
    """The last word to the caller of a request that D owns now."""
    assert record.grant is not None
    usage = types_pb2.Usage(
        prompt_tokens=len(record.request.token_ids),
        completion_tokens=len(record.request.generated_token_ids) + 1,
        cached_tokens=min(record.cached_tokens, len(record.request.token_ids)),
    )
    return prefill_pb2.HandedOff(
        decode=record.grant.decode, usage=usage, timings=timings_of(record.times)
    )


def timings_of(times: Times) -> types_pb2.Timings:
    """Where the time of a request that was handed off went."""
    queue = _between(times.called, times.first_allocate) + _between(times.granted, times.compute)
    return types_pb2.Timings(
        queue=duration(queue),
        prepare=duration(_between(times.first_allocate, times.granted)),
        allocate=duration(_between(times.allocate, times.granted)),
        compute=duration(_between(times.compute, times.first_token)),
        first_token=duration(_between(times.first_token, times.first_token_answered)),
        exposed_send=duration(_between(times.first_token, times.kv_acked)),
    )


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)
