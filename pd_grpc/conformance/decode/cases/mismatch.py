"""D64x: the two legs of a hand-over do not mean the same request."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import check_fault
from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import prompt_digest
from pd_grpc.v1 import sampling_pb2, types_pb2

BOTH = (
    "D compares prompt length, digest, sampling (with defaults filled in), max_new_tokens,"
    " cache_salt and block_hashes of Allocate with those of Generate, whichever comes later; a"
    " difference fails both with HANDOFF_MISMATCH, which names the part."
)


@case(640, BOTH)
async def another_prompt_and_the_client_first(d: DecodeHand) -> None:
    """P's digest is that of another prompt, and the client's leg was there first."""
    await _client_first(d, prompt_digest=prompt_digest([1, 2, 3]))


@case(641, BOTH)
async def another_prompt_and_p_first(d: DecodeHand) -> None:
    """P's digest is that of another prompt, and its Allocate was there first."""
    await _p_first(d, prompt_digest=prompt_digest([1, 2, 3]))


@case(642, BOTH)
async def another_length(d: DecodeHand) -> None:
    """P's prompt has a token more than the client's."""
    request = d.request()
    await _client_first(d, request, prompt_tokens=len(request.tokens) + 1)


@case(643, BOTH)
async def other_sampling(d: DecodeHand) -> None:
    """P has another seed than the client."""
    request = d.request()
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    sampling.seed += 1
    await _p_first(d, request, sampling=sampling)


@case(644, BOTH)
async def another_number_of_tokens(d: DecodeHand) -> None:
    """P says that one token more may be generated than the client asks for."""
    request = d.request()
    await _p_first(d, request, max_new_tokens=request.sampling.max_tokens + 1)


@case(645, "The request's sampling, compared with the client leg's with defaults filled in")
async def defaults_are_filled_in(d: DecodeHand) -> None:
    """What one leg leaves out and the other sets to the default is no difference."""
    p = await d.prefill()
    request = d.request(sampling=sampling_pb2.SamplingParams(max_tokens=4))
    full = sampling_pb2.SamplingParams(max_tokens=4, temperature=1, top_p=1, seed=0)
    leg = d.generate(request)
    await HandOver(d, p, request, await p.allocate(request, sampling=full), leg).completes()


@case(
    646,
    "it leaves no tombstone and P may ask again with the same ref, except where the refusal"
    " was the transfer's own end, as with HANDOFF_MISMATCH.",
)
async def a_mismatch_is_the_end(d: DecodeHand) -> None:
    """P asks again, rightly this time, and hears that the transfer has ended."""
    p, request = await _client_first(d, prompt_digest=prompt_digest([1, 2, 3]))
    await p.allocate_refused(request, Reason.RELEASED, "the transfer has ended")


async def _client_first(
    d: DecodeHand, request: Request | None = None, **fields: Any
) -> tuple[Any, Request]:
    """P's leg comes second, with these fields: both are refused, and the part is named."""
    p = await d.prefill()
    request = request or d.request()
    leg = d.generate(request)
    await d.arrived()
    fault = await p.allocate_refused(request, Reason.HANDOFF_MISMATCH, "P's leg", **fields)
    _names_the_part(fault)
    await _client_hears(leg)
    return p, request


async def _p_first(d: DecodeHand, request: Request | None = None, **fields: Any) -> None:
    """The client's leg comes second: both are told, and the part is named."""
    p = await d.prefill()
    request = request or d.request()
    await p.allocate(request, **fields)
    await _client_hears(d.generate(request))
    ended = await p.told_of(request, "transfer_ended, for the legs differ")
    expect_equal(ended.status.code, int(Code.INVALID_ARGUMENT), "status.code")
    expect_equal(ended.state, types_pb2.TRANSFER_STATE_FAILED, "state")


async def _client_hears(leg: Any) -> None:
    fault = await leg.outcome()
    what = "the legs differ"
    _names_the_part(check_fault(fault, Reason.HANDOFF_MISMATCH, what, Code.INTERNAL))


def _names_the_part(fault: Fault) -> None:
    expect(bool(fault.metadata.get("part")), "the part that differs by name", dict(fault.metadata))
