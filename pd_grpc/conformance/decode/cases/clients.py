"""D60x: a client's leg comes, before or after P's, twice, too late or never."""

from __future__ import annotations

from pd_grpc.conformance.calls import check_fault
from pd_grpc.conformance.case import NotApplicable, answer_s, expect, expect_equal
from pd_grpc.conformance.client import ClientLeg
from pd_grpc.conformance.decode import pool
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted, handed_off
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import BUDGET_S
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.v1 import decode_pb2, inference_pb2_grpc, types_pb2

EITHER = "Either leg may come first."
ABSENT = (
    "Once all KV is verified a client is awaited for Welcome.attach, then the transfer fails with "
    "CLIENT_ABSENT."
)
TOO_LATE = (
    "On D a hand-over that has ended is answered with its end, or ABORTED with RELEASED where that "
    "had no fault"
)

SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64))
"""A client that takes no more than 64 bytes before it reads; by default that may be megabytes."""


@case(601, EITHER)
async def the_client_comes_first(d: DecodeHand) -> None:
    """The client's leg is there before P asks for blocks."""
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    await d.arrived()
    await HandOver(d, p, request, await p.allocate(request), leg).completes()


@case(602, EITHER)
async def the_client_comes_second(d: DecodeHand) -> None:
    """P has a grant before the client's leg comes."""
    p = await d.prefill()
    request = d.request()
    h = HandOver(d, p, request, await p.allocate(request), None)
    h.client_comes()
    await h.completes()


@case(
    603,
    "ALREADY_EXISTS with DUPLICATE_REQUEST while the same request_id is in flight, or of a"
    " hand-over with DUPLICATE_TRANSFER while the same ref has a client",
)
async def a_second_client(d: DecodeHand) -> None:
    """A second client of the same hand-over is refused, and the first gets the answer."""
    h = await granted(d)
    await d.arrived()
    await d.generate(h.request).fails(Reason.DUPLICATE_TRANSFER, "it has a client")
    await h.completes()


@case(
    604,
    "ALREADY_EXISTS with DUPLICATE_REQUEST while the same request_id is in flight, or of a"
    " hand-over with DUPLICATE_TRANSFER while the same ref has a client",
)
async def a_request_id_in_flight(d: DecodeHand) -> None:
    """A request that D prefills itself waits for blocks; a second of its name is refused."""
    await _prefills_itself(d)
    p = await d.prefill()
    (held, *_) = await pool.fill(d, p)
    request = d.request(request_id=d.name("r"))
    first = d.generate(request, local=True)
    await d.arrived()
    second = d.generate(request, local=True)
    await second.fails(Reason.DUPLICATE_REQUEST, "its name is in flight")
    await p.release(held)
    await d.answered(first, request)


@case(605, ABSENT)
async def the_client_never_comes(d: DecodeHand) -> None:
    """Nobody comes for what was handed off; the client who comes too late is told."""
    h = await handed_off(d)
    await h.ends_as(types_pb2.TRANSFER_STATE_FAILED, d.times.attach + answer_s())
    await h.client_comes().fails(Reason.CLIENT_ABSENT, "the client comes too late")


@case(606, ABSENT)
async def p_hears_that_no_client_came(d: DecodeHand) -> None:
    """Nobody comes for a transfer that has all KV and no first token: P is told."""
    if d.times.attach > 0.9 * d.times.first_token:
        raise NotApplicable("the first token is not awaited for longer than the client")
    p = await d.prefill()
    request = d.request()
    await p.send_kv(request, await p.allocate(request))
    limit = d.times.attach + answer_s()
    ended = await p.told_of(request, "transfer_ended, for no client came", limit)
    expect_equal(ended.status.code, int(Code.DEADLINE_EXCEEDED), "status.code")
    expect_equal(ended.state, types_pb2.TRANSFER_STATE_FAILED, "state")


@case(607, "D never generates without a client.")
async def nothing_is_generated_before_the_client_comes(d: DecodeHand) -> None:
    """P has handed over all; until its client comes the transfer is no request that decodes."""
    h = await handed_off(d)
    load: decode_pb2.Load = await h.p.load_now()
    expect_equal(load.decoding_requests, 0, "decoding_requests")
    expect_equal(await h.p.release(h.request), types_pb2.TRANSFER_STATE_READY, "the state")
    h.client_comes()
    await h.answers()


@case(608, TOO_LATE)
async def a_client_of_a_failed_transfer(d: DecodeHand) -> None:
    """P gave up for a fault before the client came, who is told that fault."""
    p = await d.prefill()
    request = d.request()
    await p.allocate(request)
    await p.release(request, Fault(Reason.ENGINE_ERROR, "the kit's engine failed"))
    await d.generate(request).fails(Reason.ENGINE_ERROR, "it has ended for that")


@case(609, TOO_LATE)
async def a_client_of_a_released_transfer(d: DecodeHand) -> None:
    """P gave back without a fault before the client came, who is told RELEASED."""
    p = await d.prefill()
    request = d.request()
    await p.allocate(request)
    await p.release(request)
    leg = d.generate(request)
    check_fault(await leg.outcome(), Reason.RELEASED, "it has ended", Code.ABORTED)


@case(610, "A slow reader gets fewer, larger messages.")
async def a_slow_reader(d: DecodeHand) -> None:
    """The client has room for a few tokens and reads nothing until the answer is complete: then it
    gets every token, in fewer messages than half of them."""
    d.needs_blocks(6)
    p = await d.prefill()
    request = d.request()
    request.sampling.max_tokens = 4 * d.block_size
    async with d.channel_with(SMALL_WINDOW) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request.generate(), timeout=BUDGET_S)
        grant = await p.hand_over(request, d.first_token(request))
        h = HandOver(d, p, request, grant, None)
        await h.ends_as(types_pb2.TRANSFER_STATE_FINISHED)
        h.client = ClientLeg(call, d.transcript)
        await h.answers()
    messages, tokens = len(h.leg.messages), len(h.leg.tokens)
    expect(messages < tokens / 2, f"fewer than {tokens // 2} messages of {tokens} tokens", messages)


@case(611, "Unset on D means that D prefills it itself, the aggregated mode.")
async def the_aggregated_mode(d: DecodeHand) -> None:
    """The same request is answered alike with and without a hand-over."""
    await _prefills_itself(d)
    request = d.request()
    request.sampling.temperature = 0.7
    await d.generate(request, local=True).answers(d.answer(request))
    h = await granted(d, request)
    await h.completes()


@case(612, "Those of prompt and answer are equal in aggregated and disaggregated mode.")
async def usage_in_the_aggregated_mode(d: DecodeHand) -> None:
    """The last message of either mode has the same counts."""
    await _prefills_itself(d)
    request = d.request()
    request.generated = d.output(request, 2)
    local = d.generate(request, local=True)
    await local.finished()
    h = await granted(d, request)
    await h.completes()
    expect_equal(local.last.usage, h.leg.last.usage, "usage, as with a hand-over,")
    expect(local.last.usage.prompt_tokens == len(request.prompt), "the prompt's", local.last.usage)


async def _prefills_itself(d: DecodeHand) -> None:
    """NotApplicable for a D that takes requests from a prefill alone."""
    fault = await d.generate(d.request(), local=True).outcome()
    if isinstance(fault, Fault) and fault.reason is Reason.FEATURE:
        raise NotApplicable("D prefills nothing itself")
