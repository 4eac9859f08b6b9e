"""D70x: what is reserved, or was not negotiated, is refused by name."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.pool import load_now
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import sampling_pb2

SCOPE: dict[str, Any] = {
    "model": "another",
    "adapter": "lora",
    "cache_salt": b"salt",
    "media_hashes": [b"m" * 32],
    "tenant": "somebody",
    "priority": 1,
    "siblings": 2,
    "draft_token_ids": [301],
    "direction": sampling_pb2.DIRECTION_PULL,
}
"""Each reserved field of RequestScope, in use."""

SAMPLING: dict[str, Any] = {
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {301: 1.0},
    "n": 2,
    "prompt_logprobs": True,
    "structured_output": sampling_pb2.StructuredOutput(regex="a+"),
}
"""Each reserved field of SamplingParams, in use."""

SCOPE_OFF = sampling_pb2.RequestScope(siblings=1, direction=sampling_pb2.DIRECTION_PUSH)
SAMPLING_OFF: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
"""The same fields with the values that mean off."""


@case(700, "All of it is reserved in v1.")
async def scope_in_allocate(d: DecodeHand) -> None:
    """Allocate with each field of scope in turn is refused by its name; no block is used."""
    p = await d.prefill()
    for field, value in SCOPE.items():
        scope = sampling_pb2.RequestScope(**{field: value})
        fault = await p.allocate_refused(d.request(), Reason.FEATURE, f"scope.{field}", scope=scope)
        _named(fault, field)
    load = await load_now(p)
    expect_equal(load.free_blocks, load.total_blocks, "free_blocks")


@case(
    701,
    "A request that uses one is refused with UNIMPLEMENTED and reason FEATURE by a server"
    " that was not built for it, and so is one that needs a feature which was not negotiated",
)
async def sampling_in_allocate(d: DecodeHand) -> None:
    """Allocate with each reserved field of sampling in turn is refused by the field's name."""
    p = await d.prefill()
    for field in SAMPLING:
        sampling = _sampling(field)
        fault = await p.allocate_refused(d.request(), Reason.FEATURE, field, sampling=sampling)
        _named(fault, field)
    load = await load_now(p)
    expect_equal(load.free_blocks, load.total_blocks, "free_blocks")


@case(
    702,
    'A field or value that says "reserved" is part of the protocol\'s shape. A request that'
    " uses one is refused with UNIMPLEMENTED and reason FEATURE by a server that was not"
    " built for it, and so is one that needs a feature which was not negotiated",
)
async def scope_in_generate(d: DecodeHand) -> None:
    """Generate with each field of scope in turn is refused, with a hand-off and without."""
    for local in (False, True):
        for field, value in SCOPE.items():
            scope = sampling_pb2.RequestScope(**{field: value})
            leg = d.generate(d.request(), local=local, scope=scope)
            _named(await leg.fails(Reason.FEATURE, f"scope.{field}"), field)


@case(
    703,
    "A request that uses one is refused with UNIMPLEMENTED and reason FEATURE by a server that"
    " was not built for it, and so is one that needs a feature which was not negotiated; neither"
    " is ever ignored.",
)
async def sampling_in_generate(d: DecodeHand) -> None:
    """Generate with each reserved field of sampling is refused, with a hand-off and without."""
    for local in (False, True):
        for field in SAMPLING:
            leg = d.generate(d.request(), local=local, sampling=_sampling(field))
            _named(await leg.fails(Reason.FEATURE, field), field)


@case(704, "An Allocate that needs one which Welcome does not list is refused with FEATURE.")
async def logprobs_that_were_not_negotiated(d: DecodeHand) -> None:
    """Allocate with logprobs is refused in a session without that feature."""
    p = await d.prefill()
    for wanted in (0, 1):
        sampling = sampling_pb2.SamplingParams(max_tokens=8, logprobs=wanted)
        request = d.request()
        fault = await p.allocate_refused(request, Reason.FEATURE, "logprobs", sampling=sampling)
        _named(fault, "logprobs")
    await p.allocate(request)


@case(705, "Reserved: answers per request. 0 and 1 mean one; n above 1 is sent as n transfers.")
async def reserved_fields_that_are_off(d: DecodeHand) -> None:
    """Reserved fields with the values that mean off change nothing: the answer is the same."""
    p = await d.prefill()
    sampling = sampling_pb2.SamplingParams(max_tokens=8, temperature=0, **SAMPLING_OFF)
    request = d.request(sampling=sampling)
    leg = d.generate(request, scope=SCOPE_OFF)
    wanted = d.answer(request)
    grant = await p.allocate(request, scope=SCOPE_OFF)
    await p.first_token(request, grant, wanted[0])
    await p.send_kv(request, grant)
    await leg.answers(wanted)


def _sampling(field: str) -> sampling_pb2.SamplingParams:
    params: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, field: SAMPLING[field]}
    return sampling_pb2.SamplingParams(**params)


def _named(fault: Fault, field: str) -> None:
    """Broken unless the metadata names the field, whatever the message it is in."""
    feature = fault.metadata.get("feature", "")
    expect(feature.split(".")[-1] == field, f"metadata 'feature' that names {field}", feature)
