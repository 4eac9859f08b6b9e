"""D33x and D34x: what a shard asks of a stream before it takes KV from it."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import check_feature, check_field
from pd_grpc.conformance.case import answer_s, expect
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import replaced
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import layout_pb2

SESSION = (
    "FAILED_PRECONDITION with NO_SESSION when session_id is unknown or long superseded (the"
    " one before the newest is still taken, for a stream may cross with a new session), with"
    " STALE_EPOCH when the ref means another process of D"
)
ORDER = "FAILED_PRECONDITION with WRONG_STATE for a chunk or end before opened."


@case(330, ORDER)
async def a_chunk_before_open(d: DecodeHand) -> None:
    """The first message of a stream is a chunk."""
    h = await granted(d)
    transfer = h.p.connect(h.grant)
    await transfer.offer(h.kv()[0])
    await transfer.refused(Reason.WRONG_STATE, "a chunk before open")
    await h.completes()


@case(331, ORDER)
async def an_end_before_open(d: DecodeHand) -> None:
    """The first message of a stream is end."""
    h = await granted(d)
    transfer = h.p.connect(h.grant)
    await transfer.end()
    await transfer.refused(Reason.WRONG_STATE, "end before open")
    await h.completes()


@case(332, "INVALID_ARGUMENT with BAD_REQUEST when it is malformed")
async def a_malformed_open(d: DecodeHand) -> None:
    """Open without an attempt is refused by the field's name, and hurts nothing."""
    fault = await _refused(d, Reason.BAD_REQUEST, ref={"attempt": 0})
    check_field(fault, "attempt")


@case(333, SESSION)
async def an_open_without_a_session(d: DecodeHand) -> None:
    """Open with a session that never was is refused, and hurts nothing."""
    await _refused(d, Reason.NO_SESSION, session_id=d.name("s"))


@case(334, SESSION)
async def an_open_in_the_name_of_the_last_session(d: DecodeHand) -> None:
    """P has joined anew, and opens with the session id before."""
    h = await granted(d)
    before = h.p.welcome.session_id
    await h.p.join()
    expect(h.p.welcome.session_id != before, "another session_id", h.p.welcome)
    transfer = await h.receiving(session_id=before)
    await transfer.send_all(h.kv())
    await transfer.complete()
    await h.first_token()
    await h.answers()


@case(335, SESSION)
async def an_open_for_another_process(d: DecodeHand) -> None:
    """Open with the epoch of a D before this one is refused, and hurts nothing."""
    await _refused(d, Reason.STALE_EPOCH, ref={"decode_epoch": d.subject.instance.epoch - 1})


@case(336, "PERMISSION_DENIED with NOT_OWNER for the grant of another prefill or transfer")
async def an_open_by_another_prefill(d: DecodeHand) -> None:
    """Another P opens the grant and is refused, which hurts nothing."""
    other = await d.prefill()
    await _refused(d, Reason.NOT_OWNER, session_id=other.welcome.session_id)


@case(337, "PERMISSION_DENIED with NOT_OWNER for the grant of another prefill or transfer")
async def an_open_for_another_transfer(d: DecodeHand) -> None:
    """Open names the grant of another transfer of the same P and is refused."""
    await _refused(d, Reason.NOT_OWNER, ref={"transfer_id": d.request().transfer_id})


@case(338, "UNIMPLEMENTED with FEATURE for another transport than INLINE or the grant's")
async def another_transport(d: DecodeHand) -> None:
    """Open with a transport that is reserved is refused by name."""
    fault = await _refused(d, Reason.FEATURE, transport=layout_pb2.TRANSPORT_NIXL)
    check_feature(fault, "open.transport")


@case(339, "for a sender that is none of P's shards as the session of the grant had them")
async def a_sender_that_is_none_of_them(d: DecodeHand) -> None:
    """P has one shard, that holds everything. Open by a second one, by one of two and by one that
    lacks a layer or a head is refused by the field's name; by one that counts everything it is
    not."""
    group = d.subject.info.layout.groups[0]
    layers, heads = sum(g.layers for g in d.subject.info.layout.groups), group.planes[0].heads
    others = {"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2, "layer_start": 1}
    others |= {"head_start": 1, "layer_count": layers + 1, "head_count": heads + 1}
    h = await granted(d)
    for field, value in others.items():
        sender = layout_pb2.Shard()
        setattr(sender, field, value)
        transfer = await h.p.open(h.request, h.grant, sender=sender)
        fault = await transfer.refused(Reason.BAD_REQUEST, f"a sender with {field} {value}")
        check_field(fault, "sender")
    whole = layout_pb2.Shard(tp_size=1, layer_count=layers, head_count=heads)
    transfer = await h.receiving(sender=whole)
    await transfer.send_all(h.kv())
    await transfer.complete()
    await h.first_token()
    await h.answers()


@case(
    342,
    "Context- and data-parallel sizes and ranks are reserved: feature is then the field's path.",
)
async def a_sender_that_shares_more(d: DecodeHand) -> None:
    """Open by a shard that shares the context, or the requests, is refused by the field's path."""
    for field, value in {"cp_rank": 1, "cp_size": 2, "dp_rank": 1, "dp_size": 2}.items():
        sender = layout_pb2.Shard()
        setattr(sender, field, value)
        fault = await _refused(d, Reason.FEATURE, sender=sender)
        check_feature(fault, f"open.sender.{field}")


@case(340, "another's is refused with BAD_REQUEST.")
async def another_shard(d: DecodeHand) -> None:
    """Open for a shard that the grant does not list is refused by the field's name."""
    fault = await _refused(d, Reason.BAD_REQUEST, shard_index=99)
    check_field(fault, "shard_index")


@case(341, "A grant the shard has not heard of yet is waited for, for Welcome.kv_progress")
async def a_grant_that_nobody_gave(d: DecodeHand) -> None:
    """Open with an invented grant is held for kv_progress and then UNKNOWN_TRANSFER."""
    h = await granted(d)
    transfer = await h.p.open(h.request, h.grant, grant_id=d.name("g"))
    await transfer.stream.silent(0.6 * d.times.kv_progress, "no answer before kv_progress is over")
    limit = d.times.kv_progress + answer_s()
    await transfer.refused(Reason.UNKNOWN_TRANSFER, "kv_progress is over", limit)
    await h.completes()


async def _refused(d: DecodeHand, reason: Reason, **fields: Any) -> Fault:
    """An open with these fields must be refused; the transfer it names is as good as before.
    `ref` holds fields of the ref."""
    h = await granted(d)
    if "ref" in fields:
        fields["ref"] = replaced(h.request.ref, fields["ref"])
    transfer = await h.p.open(h.request, h.grant, **fields)
    came = await transfer.stream.next("the end of the stream")
    expect(came is None, "no answer to this open", came)
    fault = await transfer.refused(reason, "this open")
    await h.completes()
    return fault
