"""R7xx: what an operator sees of the router, and may do."""

from __future__ import annotations

import asyncio

from pd_grpc.conformance.calls import Stream, answer, refusal
from pd_grpc.conformance.case import answer_s, expect, expect_equal
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import admin_pb2, types_pb2

ANSWER = [901, 902, 903]
ROUTED, STREAMING = types_pb2.TRANSFER_STATE_ROUTED, types_pb2.TRANSFER_STATE_STREAMING


@case(701, "Who this is and how it is.")
async def server_info(r: RouterHand) -> None:
    """GetServerInfo says that a router is here, which one, and that it serves."""
    server = await r.server_info()
    expect_equal(server.instance.role, types_pb2.ROLE_ROUTER, "role")
    expect(bool(server.instance.name), "a name", server)
    expect(server.instance.epoch > 0, "an epoch", server)
    expect_equal(server.health, admin_pb2.HEALTH_SERVING, "health")


@case(702, "Router: both legs are open and no token has come.")
async def a_request_in_flight_is_listed(r: RouterHand) -> None:
    """ListTransfers has a request as ROUTED, then as STREAMING, and no longer when it has ended."""
    one = await r.routed(request_id=r.name("n"))
    info = await r.listed(one.ref.transfer_id)
    expect(info is not None and info.state == ROUTED, "the request as ROUTED", info)
    one.hand_over()
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    info = await r.listed(one.ref.transfer_id)
    expect(info is not None and info.state == STREAMING, "the request as STREAMING", info)
    one.say_last(*ANSWER[2:])
    await one.answers(ANSWER)
    expect_equal(await r.listed(one.ref.transfer_id), None, "what is listed of an ended request:")


@case(703, "on the router P's and D's as \"p > d\", D's alone when it prefills itself.")
async def a_request_is_described(r: RouterHand) -> None:
    """GetTransfer says who has a request, by which name the client knows it, and how long it is."""
    name = r.name("n")
    one = await r.routed(request_id=name)
    call = admin_pb2.GetTransferRequest(transfer_id=one.ref.transfer_id)
    found: admin_pb2.GetTransferResponse = await answer(
        r.admin.GetTransfer(call, timeout=answer_s()), "GetTransfer"
    )
    info = found.transfer
    expect_equal(info.peer, f"{r.p.name} > {r.d.name}", "peer")
    expect_equal(info.request_id, name, "request_id")
    expect_equal(info.prompt_tokens, len(one.prompt), "prompt_tokens")
    await one.finish(ANSWER)


@case(
    704,
    "One transfer, ended ones included while they are remembered. NOT_FOUND with UNKNOWN_TRANSFER.",
)
async def an_unknown_transfer(r: RouterHand) -> None:
    """GetTransfer tells of one that has just ended, and refuses an id that nobody has."""
    one = await r.routed()
    await one.finish(ANSWER)
    call = admin_pb2.GetTransferRequest(transfer_id=one.ref.transfer_id)
    found: admin_pb2.GetTransferResponse = await answer(
        r.admin.GetTransfer(call, timeout=answer_s()), "GetTransfer of one that has ended"
    )
    expect_equal(found.transfer.state, types_pb2.TRANSFER_STATE_FINISHED, "its state")
    unknown = admin_pb2.GetTransferRequest(transfer_id=r.name("unknown"))
    call = r.admin.GetTransfer(unknown, timeout=answer_s())
    await refusal(call, Reason.UNKNOWN_TRANSFER, "nobody has the id")


@case(705, "Ends a transfer by hand: its client and its peer hear RELEASED.")
async def an_operator_ends_a_request(r: RouterHand) -> None:
    """ReleaseTransfer ends a request: the client hears RELEASED, both legs are cancelled."""
    one = await r.routed()
    call = admin_pb2.ReleaseTransferRequest(transfer_id=one.ref.transfer_id, reason="a test")
    await answer(r.admin.ReleaseTransfer(call, timeout=answer_s()), "ReleaseTransfer")
    await r.fails(one.client, Reason.RELEASED, "an operator has ended it")
    await one.both_cancelled("an operator has ended it")


@case(706, "Every change of state from now on; no deadline.")
async def changes_are_pushed(r: RouterHand) -> None:
    """WatchTransfers tells of a request until its end."""
    call = r.admin.WatchTransfers(admin_pb2.WatchTransfersRequest())
    watch = Stream(call, "WatchTransfers", r.transcript)
    try:
        await _hears(r, watch)
        one = await r.routed()
        await one.finish(ANSWER)
        states = []
        while types_pb2.TRANSFER_STATE_FINISHED not in states:
            change = await watch.read("the next change of the request")
            if change.transfer.ref.transfer_id == one.ref.transfer_id:
                states.append(change.transfer.state)
    finally:
        await watch.leave()
    expect(states[0] in (ROUTED, STREAMING), "its beginning before its end", states)


async def _hears(r: RouterHand, watch: Stream) -> None:
    """Make requests until the watch tells of one: it is open then."""
    heard = asyncio.ensure_future(watch.read("a change of a request", 2 * answer_s()))
    while not heard.done():
        one = await r.routed()
        await one.finish(ANSWER)
    await heard
