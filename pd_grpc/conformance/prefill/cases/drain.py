"""P9xx: P drains. The last case: the subject takes nothing more after it."""

from __future__ import annotations

from pd_grpc.conformance.calls import if_served
from pd_grpc.conformance.case import answer_s
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.subject import PrefillHand
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import admin_pb2

DRAIN_S = 60.0
"""More than what runs can take to be finished."""
LEFT_S = 1.0


@case(
    901,
    "Takes nothing new, finishes what runs until the deadline, then exits; what is left by then"
    " fails with UNAVAILABLE, DRAINING.",
)
async def drained_by_an_operator(p: PrefillHand) -> None:
    """Drain is called with two requests in flight: a third is refused with DRAINING, the first is
    handed over, and the second, whose D grants nothing, fails with DRAINING at the deadline, which
    a repeated call has brought forward."""
    d, silent = await p.decode(), await p.decode()
    d.kv.end.hold()
    silent.allocate.hold()
    running, stuck = p.call(p.request(), d), p.call(p.request(), silent)
    await d.kv.end.came("end")
    await silent.allocate.came("Allocate")
    await _drain(p, DRAIN_S)
    await p.refused(p.request(), Reason.DRAINING, "P drains")
    d.go()
    await running.handed_off()
    await _drain(p, LEFT_S)
    await stuck.fails(Reason.DRAINING, "the drain's deadline is over", LEFT_S + answer_s())
    p.subject.left = True


async def _drain(p: PrefillHand, deadline_s: float) -> None:
    request = admin_pb2.DrainRequest(deadline=duration(deadline_s))
    await if_served(p.admin.Drain(request, timeout=answer_s()), "AdminService.Drain")
