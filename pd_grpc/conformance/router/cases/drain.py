"""R9xx: the router leaves. A drain is for ever, so this comes last."""

from __future__ import annotations

from pd_grpc.conformance.calls import answer
from pd_grpc.conformance.case import NotApplicable, answer_s, expect_equal
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import admin_pb2

ANSWER = [901, 902, 903]
DRAIN_S = 60.0
"""More than what runs can take to be finished."""
LEFT_S = 0.5


@case(
    901,
    "Takes nothing new, finishes what runs until the deadline, then exits; what is left by "
    "then fails with UNAVAILABLE, DRAINING.",
)
async def drain(r: RouterHand) -> None:
    """A draining router refuses what is new, finishes one request, and ends another with DRAINING
    when the deadline has come, which a repeated call has brought forward."""
    if r.subject.drained:
        raise NotApplicable("the router has drained already")
    finishes, stays = await r.routed(), await r.routed()
    r.subject.drained = True
    told = await _drain(r, DRAIN_S)
    expect_equal(told.transfers, 2, "transfers still in flight")
    await r.turns(False)
    await r.refused(Reason.DRAINING, "the router drains")
    server = await r.server_info()
    expect_equal(server.health, admin_pb2.HEALTH_DRAINING, "health")
    await finishes.finish(ANSWER)
    await _drain(r, LEFT_S)
    await r.fails(stays.client, Reason.DRAINING, "the drain's deadline has come")
    await stays.both_cancelled("the drain's deadline has come")


async def _drain(r: RouterHand, deadline_s: float) -> admin_pb2.DrainResponse:
    request = admin_pb2.DrainRequest(deadline=duration(deadline_s))
    call = r.admin.Drain(request, timeout=answer_s())
    told: admin_pb2.DrainResponse = await answer(call, "Drain answered at once")
    return told
