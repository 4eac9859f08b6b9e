"""D80x and D81x: what a later version of the protocol may send, and what is no message at all."""

from __future__ import annotations

from typing import Any, cast

import grpc.aio

from pd_grpc.conformance.calls import (
    Stream,
    answer,
    check_fault,
    check_feature,
    check_field,
    refusal,
)
from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.later import UNKNOWN_VALUE, later, with_unknown
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import decode_pb2, sampling_pb2, transfer_pb2

IGNORED = "A server ignores fields that it does not know"
REFUSED = "A request with an enum value that the server does not know is refused"
WAYS = (
    "with FEATURE where the value names a way to do the thing (kind of a layout's group or plane, "
    "transport of a Transfer, direction), with BAD_REQUEST elsewhere."
)


@case(801, IGNORED)
async def unknown_fields_of_a_session(d: DecodeHand) -> None:
    """Hello, heartbeat and goodbye have fields of a later version, and do what they always do."""
    p = d.new_prefill()
    stream = p.open_session()
    await stream.send(later(decode_pb2.SessionRequest(hello=p.hello())))
    first = await stream.read("welcome")
    expect(first.HasField("welcome"), "welcome as the first message", first)
    beat = decode_pb2.Heartbeat(sequence=1)
    await stream.send(later(decode_pb2.SessionRequest(heartbeat=beat)))
    second = await stream.read("the ack")
    expect_equal(second.heartbeat_ack.sequence, 1, "heartbeat_ack.sequence")
    await stream.send(later(decode_pb2.SessionRequest(goodbye=decode_pb2.Goodbye())))
    await stream.fine("goodbye")


@case(802, IGNORED)
async def unknown_fields_of_a_hand_over(d: DecodeHand) -> None:
    """Both legs' calls have fields of a later version; the answer is right."""
    p = await d.prefill()
    request = d.request()
    leg = d.call_generate(later(request.generate()))
    message = later(request.allocate(p.welcome.session_id))
    grant: decode_pb2.AllocateResponse = await answer(p.decode.Allocate(message), "a grant")
    p.held.add(grant.grant_id)
    h = HandOver(d, p, request, grant, leg)
    first = later(p.first_token_message(request, grant, d.first_token(request)))
    await answer(p.send_first(first), "the first token taken")
    await h.send_kv()
    await h.answers()


@case(803, IGNORED)
async def unknown_fields_of_a_release(d: DecodeHand) -> None:
    """Release has fields of a later version, and the client hears it."""
    h = await granted(d)
    message = decode_pb2.ReleaseRequest(session_id=h.p.welcome.session_id, ref=h.request.ref)
    await answer(h.p.decode.Release(later(message)), "the transfer taken back")
    await h.leg.fails(Reason.RELEASED, "P gave it back")


@case(804, IGNORED)
async def unknown_fields_of_a_transfer(d: DecodeHand) -> None:
    """Open, chunks and end have fields of a later version; the answer is right."""
    h = await granted(d)
    transfer = h.p.connect(h.grant)
    opening = transfer_pb2.TransferOpen(
        session_id=h.p.welcome.session_id, ref=h.request.ref, grant_id=h.grant.grant_id
    )
    await transfer.stream.send(later(transfer_pb2.TransferRequest(open=opening)))
    await transfer.opened()
    for piece in h.kv():
        await transfer.send_all([later(piece)])
    end = transfer_pb2.TransferEnd(chunks=transfer.chunks, bytes=transfer.bytes)
    await transfer.stream.send(later(transfer_pb2.TransferRequest(end=end)))
    last = await transfer.stream.read("completed")
    expect(last.HasField("completed"), "completed as the answer to end", last)
    await h.first_token()
    await h.answers()


@case(805, "where two bodies are compared they are part of the body.")
async def unknown_fields_of_a_repeated_allocate(d: DecodeHand) -> None:
    """The same Allocate with a field of a later version is another body."""
    h = await granted(d)
    message = later(h.request.allocate(h.p.welcome.session_id))
    await refusal(h.p.decode.Allocate(message), Reason.DUPLICATE_TRANSFER, "another body")
    await h.completes()


@case(
    806,
    "A message of a stream that has none of the known members is ignored by whoever reads a"
    " Session after its first message, or an answer",
)
async def an_unknown_message_on_a_session(d: DecodeHand) -> None:
    """A message of a kind of a later version changes nothing; the next heartbeat is answered."""
    p = await d.prefill()
    await p.session.send(later(decode_pb2.SessionRequest()))
    await p.heartbeat()


@case(
    807,
    "In Transfer a shard refuses it with BAD_REQUEST, for it must understand all that was sent.",
)
async def an_unknown_message_on_a_transfer(d: DecodeHand) -> None:
    """A message of a kind of a later version ends the stream."""
    h = await granted(d)
    transfer = await h.receiving()
    await transfer.stream.offer(later(transfer_pb2.TransferRequest()))
    await transfer.refused(Reason.BAD_REQUEST, "a message of an unknown kind")


@case(808, REFUSED)
async def an_unknown_role(d: DecodeHand) -> None:
    """A hello with a role of a later version is refused by the field's name."""
    p = d.new_prefill()
    instance = with_unknown(p.hello().instance, "role")
    check_field(await p.refused(Reason.BAD_REQUEST, "an unknown role", instance=instance), "role")


@case(809, WAYS)
async def an_unknown_transport(d: DecodeHand) -> None:
    """A Transfer by a transport of a later version is refused by name, and hurts nothing."""
    h = await granted(d)
    transfer = await h.p.open(h.request, h.grant, transport=UNKNOWN_VALUE)
    check_feature(await transfer.refused(Reason.FEATURE, "an unknown transport"), "open.transport")
    await h.completes()


@case(810, WAYS)
async def an_unknown_direction(d: DecodeHand) -> None:
    """Either leg with a direction of a later version is refused by name."""
    p = await d.prefill()
    scope = with_unknown(sampling_pb2.RequestScope(), "direction")
    faults = (
        await p.allocate_refused(d.request(), Reason.FEATURE, "an unknown direction", scope=scope),
        await d.generate(d.request(), scope=scope).fails(Reason.FEATURE, "an unknown direction"),
    )
    for fault in faults:
        check_feature(fault, "scope.direction")


@case(811, REFUSED)
async def an_unknown_finish_reason(d: DecodeHand) -> None:
    """A first token with a reason of a later version is refused by the field's name."""
    h = await granted(d)
    token = with_unknown(decode_pb2.FirstToken(token_id=h.any_token), "finish_reason")
    what = "an unknown finish_reason"
    fault = await h.first_token_refused(Reason.BAD_REQUEST, what, tokens=[token])
    check_field(fault, "finish_reason")
    await h.completes()


@case(812, "INVALID_ARGUMENT with BAD_REQUEST for what is no message")
async def no_message_on_a_session(d: DecodeHand) -> None:
    """After welcome comes what is no protobuf, and ends the session."""
    p = d.new_prefill()
    async with grpc.aio.insecure_channel(d.subject.endpoint) as channel:
        call = cast(Any, channel).stream_stream(
            "/pd_grpc.v1.DecodeService/Session",
            response_deserializer=decode_pb2.SessionResponse.FromString,
        )()
        stream = Stream(call, "Session", d.transcript)
        await _send_bytes(stream, decode_pb2.SessionRequest(hello=p.hello()).SerializeToString())
        await stream.read("welcome")
        await _send_bytes(stream, b"\xff\xff\xff")
        check_fault(await stream.outcome(), Reason.BAD_REQUEST, "what is no message")
        await stream.leave()


async def _send_bytes(stream: Stream, data: bytes) -> None:
    """Send bytes as they are; grpc serializes nothing where it is given no serializer."""
    await stream.offer(cast(Any, data))
