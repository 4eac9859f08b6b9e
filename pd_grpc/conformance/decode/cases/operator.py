"""D52x: transfers that an operator ends."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import if_served, refusal_if_served
from pd_grpc.conformance.case import answer_s, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.v1 import admin_pb2, types_pb2


@case(520, "Ends a transfer by hand: its client and its peer hear RELEASED.")
async def released_by_an_operator(d: DecodeHand) -> None:
    """An operator ends a transfer that has a grant: client and P hear RELEASED."""
    h = await granted(d)
    ended = await if_served(_release(d, h.request.transfer_id), "the transfer as it ended")
    expect_equal(ended.transfer.state, types_pb2.TRANSFER_STATE_RELEASED, "transfer.state")
    await h.leg.fails(Reason.RELEASED, "an operator ended it")
    told = await h.p.told_of(h.request, "transfer_ended, for an operator ended it")
    expect_equal(told.status.code, int(Code.ABORTED), "status.code")


@case(521, "One that has ended stays as it is.")
async def an_end_stays_as_it_is(d: DecodeHand) -> None:
    """An operator ends a transfer that has FAILED."""
    h = await granted(d)
    await h.p.release(h.request, Fault(Reason.ENGINE_ERROR, "the kit's engine failed"))
    ended = await if_served(_release(d, h.request.transfer_id), "the transfer as it ended")
    expect_equal(ended.transfer.state, types_pb2.TRANSFER_STATE_FAILED, "transfer.state")


@case(522, "nobody knows the transfer or grant")
async def nobody_knows_it(d: DecodeHand) -> None:
    """An operator ends a transfer that never was."""
    call = _release(d, d.request().transfer_id)
    await refusal_if_served(call, Reason.UNKNOWN_TRANSFER, "a transfer that never was")


def _release(d: DecodeHand, transfer_id: str) -> Any:
    request = admin_pb2.ReleaseTransferRequest(transfer_id=transfer_id, reason="the kit says so")
    return d.admin.ReleaseTransfer(request, timeout=answer_s())
