"""R42x: an instance is gone, or another process has taken its place."""

from __future__ import annotations

from pd_grpc.conformance.calls import check_metadata
from pd_grpc.conformance.case import expect
from pd_grpc.conformance.router.answers import queued
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import types_pb2

ANSWER = [901, 902, 903]


@case(421, "P was lost before the hand-off")
async def prefill_is_lost(r: RouterHand) -> None:
    """P's connection is lost while D waits: the client hears PREFILL_LOST, D's leg is cancelled."""
    one = await r.routed()
    one.prefill.send(queued())
    await r.instances.cut(r.p)
    await r.fails(one.client, Reason.PREFILL_LOST, "P is lost")
    await one.decode.cancelled("P is lost")


@case(422, "D was lost before the end")
async def decode_is_lost_before_the_first_token(r: RouterHand) -> None:
    """D's connection is lost while P computes: the client hears DECODE_LOST, P's leg is
    cancelled."""
    one = await r.routed()
    await r.instances.cut(r.d)
    await r.fails(one.client, Reason.DECODE_LOST, "D is lost")
    await one.prefill.cancelled("D is lost")


@case(423, "D was lost before the end")
async def decode_is_lost_in_mid_answer(r: RouterHand) -> None:
    """D's connection is lost after two tokens: the client has them, and hears DECODE_LOST."""
    one = await r.routed()
    one.hand_over()
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    await r.instances.cut(r.d)
    await r.fails(one.client, Reason.DECODE_LOST, "D is lost")


@case(424, "What happens to P after handed_off changes nothing.")
async def prefill_is_lost_after_the_hand_off(r: RouterHand) -> None:
    """P's connection is lost after it handed over: the answer goes on to its end."""
    one = await r.routed()
    one.hand_over()
    await one.prefill.over("P's leg over")
    await r.instances.cut(r.p)
    await r.turns(False)
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    one.say_last(*ANSWER[2:])
    await one.answers(ANSWER)


@case(425, "After hand-off P's lease, session, epoch and Release no longer touch the transfer")
async def prefill_is_lost_before_it_told_of_the_hand_off(r: RouterHand) -> None:
    """P's connection is lost when D, as its tokens show, has the request already: the answer goes
    on to its end."""
    one = await r.routed()
    r.d.states[one.ref.transfer_id] = types_pb2.TRANSFER_STATE_DECODING
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    await r.instances.cut(r.p)
    await r.turns(False)
    one.say_last(*ANSWER[2:])
    await one.answers(ANSWER)


@case(426, "An instance that was restarted is met under its new epoch.")
async def decode_restarts(r: RouterHand) -> None:
    """D is gone and comes back as another process: the next request means that one."""
    before = r.d.instance.epoch
    await r.instances.cut(r.d)
    await r.turns(False)
    r.d.restart()
    await r.d.line.mend()
    await r.subject.routes_to(r.d)
    one = await r.routed()
    ref = one.decode.request.handoff.ref
    expect(ref.decode_epoch in (0, r.d.instance.epoch), f"no epoch {before} any more", ref)
    await one.finish(ANSWER)


@case(427, "the call means another process of the instance, or comes from a superseded one")
async def decode_restarts_unseen(r: RouterHand) -> None:
    """D restarted behind a proxy that kept the connection: the request that means the old process
    fails with STALE_EPOCH, and the next one means the new one."""
    one = await r.routed()
    r.instances.disturbed = True
    r.d.restart()
    epochs = {"meant": "1", "here": "2"}
    one.decode.fail(Fault(Reason.STALE_EPOCH, "another process answers here", epochs))
    fault = await r.fails(one.client, Reason.STALE_EPOCH, "the process meant is gone")
    check_metadata(fault, **epochs)
    await one.prefill.cancelled("the process meant is gone")
    await r.subject.routes_to(r.d)
    after = await r.routed()
    ref = after.decode.request.handoff.ref
    expect(ref.decode_epoch in (0, r.d.instance.epoch), "the new epoch, or 0", ref)
    await after.finish(ANSWER)
