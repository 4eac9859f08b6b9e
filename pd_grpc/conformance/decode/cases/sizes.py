"""D82x: messages at their limits of size, and names and times at theirs."""

from __future__ import annotations

import grpc

from pd_grpc.conformance.case import answer_s, broken, expect, expect_equal, within
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.rpc import read_error
from pd_grpc.v1 import inference_pb2

MIB = 1 << 20
MANY_GRANTS = 10_000
LONG_PROMPT = 1_000_000
LONG_TIMES_S = (3e9, 315_576_000_000)
"""What 32 bits cannot count, and the longest Duration there is."""


@case(
    820,
    "gRPC itself refuses a larger one, with RESOURCE_EXHAUSTED and no ErrorInfo: that is never "
    "about blocks.",
)
async def a_message_too_large(d: DecodeHand) -> None:
    """An Allocate of 17 MiB is refused by the transport, and the next hand-over completes."""
    p = await d.prefill()
    call = p.ask(d.request(), prompt_digest=bytes(17 * MIB))
    try:
        got = await within(None, call, "the refusal of a message of 17 MiB")
    except grpc.RpcError as error:
        fault = read_error(error)
        right = not isinstance(fault, Fault) and fault.code is Code.RESOURCE_EXHAUSTED
        expect(right, "RESOURCE_EXHAUSTED without an ErrorInfo", fault)
    else:
        broken("RESOURCE_EXHAUSTED without an ErrorInfo", got)
    # Another P's: so much work may have kept the heartbeats of this one back.
    await (await granted(d)).completes()


@case(821, "At least one, each below the vocabulary's size; packed, up to a million.")
async def a_prompt_of_a_million_tokens(d: DecodeHand) -> None:
    """A prompt of a million ids is judged by its length in tokens, not in bytes."""
    ids = d.request().prompt
    whole = inference_pb2.TokenIds(ids=(ids * (LONG_PROMPT // len(ids) + 1))[:LONG_PROMPT])
    limit = 2 * answer_s()
    leg = d.generate(d.request(), token_ids=whole, timeout_s=limit)
    fault = await leg.outcome(limit + answer_s())
    reasons = (Reason.BAD_REQUEST, Reason.TOO_LARGE, Reason.STAGE_DEADLINE)
    judged = isinstance(fault, Fault) and fault.reason in reasons
    if isinstance(fault, Fault) and fault.reason is Reason.BAD_REQUEST:
        judged = any("token_ids" in wrong.field for wrong in fault.fields)
    expect(judged, "a refusal for its tokens, or nothing before its deadline", fault)


@case(822, "Listed grants that D does not know as this P's")
async def a_heartbeat_of_many_grants(d: DecodeHand) -> None:
    """A heartbeat lists ten thousand grants that are none; its ack names every one."""
    p = await d.prefill(beats=False)
    grants = [f"kit-none-{n}" for n in range(MANY_GRANTS)]
    ack = await p.heartbeat(*grants)
    expect_equal(len(set(ack.unknown_grant_ids) & set(grants)), MANY_GRANTS, "unknown grants:")


@case(823, "1 to 128 characters of [A-Za-z0-9._:-], unique for ever")
async def the_longest_transfer_id(d: DecodeHand) -> None:
    """A transfer_id of 128 characters goes through the whole hand-over."""
    request = d.request()
    request.transfer_id = request.transfer_id.ljust(128, ":")
    await (await granted(d, request)).completes()


@case(824, "Durations cross the wire, never points in time")
async def the_longest_times(d: DecodeHand) -> None:
    """Budgets and waits of a hundred and of ten thousand years are as good as any."""
    for seconds in LONG_TIMES_S:
        h = await granted(d, max_wait=duration(seconds), budget=duration(seconds))
        await h.completes()
