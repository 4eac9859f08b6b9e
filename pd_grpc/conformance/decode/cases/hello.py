"""D12x: hellos that are malformed, and those at the edge of what is allowed."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import check_field
from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.later import UNKNOWN_VALUE
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import layout_pb2, types_pb2


@case(120, "Stable name, such as a pod's: 1 to 128 characters.")
async def a_name_out_of_bounds(d: DecodeHand) -> None:
    """P without a name, and P with one of 129 characters, are refused."""
    for name in ("", "n" * 129):
        await _refused(d, "name", name=name)


@case(121, "Stable name, such as a pod's: 1 to 128 characters. It survives a restart.")
async def a_long_name(d: DecodeHand) -> None:
    """P with a name of 128 characters is welcome, whatever script they are of."""
    for letter in "nü":
        await d.prefill(name=d.name("").ljust(128, letter))


@case(122, "0 is never minted and is refused.")
async def epoch_zero(d: DecodeHand) -> None:
    """P with epoch 0 is refused."""
    await _refused(d, "epoch", epoch=0)


@case(
    123, "INVALID_ARGUMENT with BAD_REQUEST for a malformed hello or another role than ROLE_PREFILL"
)
async def another_role(d: DecodeHand) -> None:
    """D, a router, and one that says no role are refused."""
    for role in (types_pb2.ROLE_DECODE, types_pb2.ROLE_ROUTER, types_pb2.ROLE_UNSPECIFIED):
        await _refused(d, "role", role=role)


@case(124, "Layouts P can send, best first; at least one.")
async def no_layout(d: DecodeHand) -> None:
    """P without a layout is refused."""
    fault = await d.new_prefill().refused(Reason.BAD_REQUEST, "no layouts", layouts=[])
    check_field(fault, "layouts")


@case(
    125,
    "BAD_REQUEST comes with google.rpc.BadRequest, a violation for each field that is"
    " wrong, by its path from the message sent, such as sampling.top_p or"
    " hello.instance.name",
)
async def every_wrong_field_is_named(d: DecodeHand) -> None:
    """P with two wrong fields hears of both, each by its path."""
    fault = await _refused(d, "name", name="", epoch=0)
    named = [wrong.field for wrong in fault.fields]
    for path in ("hello.instance.name", "hello.instance.epoch"):
        expect(path in named, f"a violation that names {path}", named)


@case(
    126,
    "FAILED_PRECONDITION with LAYOUT_MISMATCH, the field and both values, when layout,"
    " transport, shards or hash algorithm do not fit, with STALE_EPOCH when a newer process"
    " of P has been seen, with WRONG_INSTANCE",
)
async def transports_without_inline(d: DecodeHand) -> None:
    """P that has only a transport that is reserved is refused; P that names none gets INLINE."""
    transports = [layout_pb2.TRANSPORT_NIXL]
    p = d.new_prefill()
    fault = await p.refused(Reason.LAYOUT_MISMATCH, "INLINE not offered", transports=transports)
    expect_equal(fault.metadata.get("field"), "transports", "metadata 'field'")
    for side in ("ours", "theirs"):
        expect(bool(fault.metadata.get(side)), f"metadata {side!r}", dict(fault.metadata))
    welcome = await p.join(transports=[])
    expect_equal(welcome.transport, layout_pb2.TRANSPORT_INLINE, "transport")


@case(127, "An unknown transport among those that Hello offers is one that D cannot choose.")
async def an_unknown_transport_beside_inline(d: DecodeHand) -> None:
    """P that prefers a transport of a later version, and has INLINE too, gets INLINE."""
    p = d.new_prefill()
    welcome = await p.join(transports=[UNKNOWN_VALUE, layout_pb2.TRANSPORT_INLINE])
    expect_equal(welcome.transport, layout_pb2.TRANSPORT_INLINE, "transport")


@case(128, "Empty means INLINE, and so does unspecified among them.")
async def an_unspecified_transport(d: DecodeHand) -> None:
    """P that offers a transport without saying which gets INLINE, alone and behind another."""
    unspecified = layout_pb2.TRANSPORT_UNSPECIFIED
    for transports in ([unspecified], [layout_pb2.TRANSPORT_NIXL, unspecified]):
        welcome = await d.new_prefill().join(transports=transports)
        expect_equal(welcome.transport, layout_pb2.TRANSPORT_INLINE, "transport")


async def _refused(d: DecodeHand, field: str, **instance: Any) -> Fault:
    """The fault of a hello whose instance has these fields instead of the right ones."""
    p = d.new_prefill()
    who = types_pb2.Instance()
    who.CopyFrom(p.instance)
    for name, value in instance.items():
        setattr(who, name, value)
    fault = await p.refused(Reason.BAD_REQUEST, f"instance with {instance}", instance=who)
    check_field(fault, field)
    return fault
