"""D90x: what an operator sees of a D that serves AdminService, and its health."""

from __future__ import annotations

from collections.abc import Sequence

from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_grpc.conformance.calls import Stream, check_field, if_served, refusal_if_served
from pd_grpc.conformance.case import answer_s, expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.pool import request_of
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import admin_pb2, types_pb2

RESERVED = types_pb2.TRANSFER_STATE_RESERVED
RELEASED = types_pb2.TRANSFER_STATE_RELEASED
SERVING = health_pb2.HealthCheckResponse.SERVING


@case(
    900,
    "the empty name is SERVING while the process is up, the full name of a service of its own"
    " while it takes new requests, and NOT_SERVING otherwise.",
)
async def health_of_a_running_instance(d: DecodeHand) -> None:
    """Health is asked for the process and for DecodeService: both are SERVING."""
    stub = health_pb2_grpc.HealthStub(d.channel)
    for service in ("", "pd_grpc.v1.DecodeService"):
        request = health_pb2.HealthCheckRequest(service=service)
        call = stub.Check(request, timeout=answer_s())
        answer = await if_served(call, f"grpc.health.v1 of {service or 'the process'}")
        expect_equal(answer.status, SERVING, f"status of {service!r}")


@case(901, "Blocks of the pool by state; states without blocks are left out. The sum is the pool.")
async def server_info_counts_the_pool(d: DecodeHand) -> None:
    """GetServerInfo is asked while three blocks are granted: it names D and counts every block."""
    d.needs_blocks(3)
    info = await _server_info(d)
    expect_equal(info.instance, d.subject.instance, "instance, that of Welcome,")
    expect_equal(info.health, admin_pb2.HEALTH_SERVING, "health")
    p = await d.prefill()
    await p.allocate(request_of(d, 3))
    counts = {count.state: count.blocks for count in (await _server_info(d)).blocks}
    expect_equal(sum(counts.values()), d.subject.total_blocks, "the sum of blocks")
    expect_equal(counts.get(admin_pb2.BLOCK_STATE_RESERVED), 3, "blocks that are RESERVED")
    expect(all(counts.values()), "no state without blocks", counts)


@case(902, "Oldest first.")
async def transfers_in_flight_are_listed(d: DecodeHand) -> None:
    """Three transfers begin and one ends: the other two are listed, oldest first."""
    d.needs_blocks(6)
    p = await d.prefill()
    requests = [d.request() for _ in range(3)]
    for request in requests:
        await p.allocate(request)
    await p.release(requests[1])
    listed = (await _list(d)).transfers
    wanted = [requests[0].ref, requests[2].ref]
    expect_equal([info.ref for info in listed], wanted, "the transfers listed")


@case(903, "From the previous answer; empty starts at the beginning.")
async def pages_follow_each_other(d: DecodeHand) -> None:
    """Three transfers are listed one on a page: every page has the next, the last no token."""
    d.needs_blocks(6)
    p = await d.prefill()
    requests = [d.request() for _ in range(3)]
    for request in requests:
        await p.allocate(request)
    token = ""
    for n, request in enumerate(requests):
        page = await _list(d, page_size=1, page_token=token)
        expect_equal([info.ref for info in page.transfers], [request.ref], f"page {n + 1}")
        token = page.next_page_token
        expect_equal(bool(token), n < len(requests) - 1, f"a token on page {n + 1}:")


@case(904, "Only these states; empty means all.")
async def transfers_of_one_state(d: DecodeHand) -> None:
    """A transfer that is RESERVED and one that is EXPECTED: each is listed by its state alone."""
    p = await d.prefill()
    reserved, expected = d.request(), d.request()
    await p.allocate(reserved)
    d.generate(expected)
    await d.arrived()
    for request, state in ((reserved, RESERVED), (expected, types_pb2.TRANSFER_STATE_EXPECTED)):
        listed = (await _list(d, states=[state])).transfers
        expect_equal([info.ref for info in listed], [request.ref], f"transfers in state {state}")


@case(905, "The other instance: P's name on D, empty until its Allocate has come")
async def a_transfer_as_an_operator_sees_it(d: DecodeHand) -> None:
    """GetTransfer of one in flight tells its state, blocks, P, prompt and name."""
    d.needs_blocks(2)
    p = await d.prefill()
    request = request_of(d, 2, request_id=d.name("r"))
    await p.allocate(request)
    info = await _get(d, request.transfer_id)
    expect_equal(info.ref, request.ref, "ref")
    expect_equal(info.state, RESERVED, "state")
    expect_equal(info.blocks, 2, "blocks")
    expect_equal(info.peer, p.instance.name, "peer")
    expect_equal(info.prompt_tokens, len(request.prompt), "prompt_tokens")
    expect_equal(info.request_id, request.request_id, "request_id")


@case(906, "One transfer, ended ones included while they are remembered.")
async def a_transfer_that_has_ended(d: DecodeHand) -> None:
    """GetTransfer of one that was given back tells its end."""
    p = await d.prefill()
    request = d.request()
    await p.allocate(request)
    await p.release(request)
    info = await _get(d, request.transfer_id)
    expect_equal(info.state, RELEASED, "state")
    expect_equal(info.blocks, 0, "blocks")
    listed = [found.ref for found in (await _list(d)).transfers]
    expect(request.ref not in listed, "no transfer listed that has ended", listed)


@case(907, "NOT_FOUND with UNKNOWN_TRANSFER.")
async def a_transfer_that_nobody_knows(d: DecodeHand) -> None:
    """GetTransfer of a transfer, and of an attempt, that never was."""
    p = await d.prefill()
    request = d.request()
    await p.allocate(request)
    for transfer_id, attempt in ((d.request().transfer_id, 0), (request.transfer_id, 2)):
        asked = admin_pb2.GetTransferRequest(transfer_id=transfer_id, attempt=attempt)
        call = d.admin.GetTransfer(asked, timeout=answer_s())
        await refusal_if_served(
            call, Reason.UNKNOWN_TRANSFER, f"attempt {attempt} of {transfer_id}"
        )


@case(908, "Which attempt; 0 means the newest.")
async def the_newest_attempt(d: DecodeHand) -> None:
    """GetTransfer without an attempt finds the second; with attempt 1 the first, superseded."""
    p = await d.prefill()
    request = d.request()
    await p.allocate(request)
    request.attempt = 2
    await p.allocate(request)
    expect_equal((await _get(d, request.transfer_id)).ref.attempt, 2, "attempt, the newest,")
    first = await _get(d, request.transfer_id, 1)
    expect_equal(first.state, types_pb2.TRANSFER_STATE_FAILED, "state of attempt 1")


@case(909, "Every change of state from now on; no deadline.")
async def changes_are_watched(d: DecodeHand) -> None:
    """One of two transfers is watched: its grant and its end are told, the other's are not."""
    await _list(d)
    p = await d.prefill()
    request, other = d.request(), d.request()
    watched = admin_pb2.WatchTransfersRequest(transfer_id=request.transfer_id)
    stream = Stream(d.admin.WatchTransfers(watched), "WatchTransfers", d.transcript)
    await d.arrived()
    for wanted in (other, request):
        await p.allocate(wanted)
        await p.release(wanted)
    seen = []
    while RELEASED not in seen:
        change = (await stream.read("a change")).transfer
        expect_equal(change.ref, request.ref, "ref, of the transfer watched,")
        seen.append(change.state)
    expect(RESERVED in seen, "RESERVED before RELEASED", seen)
    await stream.leave()


@case(910, "At most this many, 1 to 10,000; 0 means 1,000.")
async def a_page_too_large(d: DecodeHand) -> None:
    """ListTransfers with a page of 10,001 is refused; with one of 10,000 it is not."""
    await _list(d, page_size=10_000)
    request = admin_pb2.ListTransfersRequest(page_size=10_001)
    call = d.admin.ListTransfers(request, timeout=answer_s())
    fault = await refusal_if_served(call, Reason.BAD_REQUEST, "a page of 10,001")
    check_field(fault, "page_size")


@case(911, "unset means the server's configured time, 0 none at all, and below 0 is refused.")
async def a_drain_in_the_past(d: DecodeHand) -> None:
    """Drain with a deadline below 0 is refused, and D takes new requests as before."""
    p = await d.prefill()
    request = admin_pb2.DrainRequest(deadline=duration(0))
    request.deadline.seconds = -1
    call = d.admin.Drain(request, timeout=answer_s())
    fault = await refusal_if_served(call, Reason.BAD_REQUEST, "a deadline of -1 s")
    check_field(fault, "deadline")
    await p.allocate(d.request())


async def _server_info(d: DecodeHand) -> admin_pb2.ServerInfo:
    call = d.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=answer_s())
    answer: admin_pb2.GetServerInfoResponse = await if_served(call, "GetServerInfo")
    return answer.server


async def _list(
    d: DecodeHand,
    page_size: int = 0,
    page_token: str = "",
    states: Sequence[types_pb2.TransferState] = (),
) -> admin_pb2.ListTransfersResponse:
    """Transfers in flight. NotApplicable for a D without ListTransfers."""
    request = admin_pb2.ListTransfersRequest(
        page_size=page_size, page_token=page_token, states=states
    )
    call = d.admin.ListTransfers(request, timeout=answer_s())
    answer: admin_pb2.ListTransfersResponse = await if_served(call, "ListTransfers")
    return answer


async def _get(d: DecodeHand, transfer_id: str, attempt: int = 0) -> admin_pb2.TransferInfo:
    request = admin_pb2.GetTransferRequest(transfer_id=transfer_id, attempt=attempt)
    call = d.admin.GetTransfer(request, timeout=answer_s())
    answer: admin_pb2.GetTransferResponse = await if_served(call, "GetTransfer")
    return answer.transfer
