"""D22x: the bounds of sampling, as Allocate has them."""

from __future__ import annotations

import math
from typing import Any

from pd_grpc.conformance.calls import check_field
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import sampling_pb2


@case(220, "0 means the router's default (256 unless configured); P and D refuse 0.")
async def max_tokens(d: DecodeHand) -> None:
    """Values of max_tokens below 1 are refused, 1 is not."""
    await _bounds(d, "max_tokens", good=[1], bad=[0, -1])


@case(
    221,
    "End-of-sequence, stop ids and stop strings do not end the answer before this many tokens;"
    " 0 to max_tokens.",
)
async def min_tokens(d: DecodeHand) -> None:
    """Values of min_tokens below 0 and above max_tokens are refused, both limits are not."""
    await _bounds(d, "min_tokens", good=[0, 8], bad=[-1, 9])


@case(222, "Flattens (above 1) or sharpens (below 1) the distribution; 0 to 100.")
async def temperature(d: DecodeHand) -> None:
    """A temperature below 0, above 100 or that is no number is refused, 0 and 100 are not."""
    await _bounds(d, "temperature", good=[0.0, 100.0], bad=[-0.01, 100.01, math.nan, math.inf])


@case(
    223,
    "Nucleus sampling: the smallest set of likeliest tokens whose probabilities reach this;"
    " above 0 and at most 1.",
)
async def top_p(d: DecodeHand) -> None:
    """Values of top_p up to 0, above 1 and no number are refused, a little and 1 are not."""
    await _bounds(d, "top_p", good=[1e-9, 1.0], bad=[0.0, -0.5, 1.01, math.nan])


@case(224, "Only the k likeliest tokens; 0 is off, below 0 is refused.")
async def top_k(d: DecodeHand) -> None:
    """Values of top_k below 0 are refused, 0 and the greatest are not."""
    await _bounds(d, "top_k", good=[0, 2**31 - 1], bad=[-1])


@case(
    225,
    "Strings that end the answer; the text ends before them. At most 16, each 1 to 256"
    " characters; empty: none.",
)
async def stop(d: DecodeHand) -> None:
    """Too many stop strings, an empty one and a long one are refused, the limits are not."""
    longest = ["ü" * 256] * 16
    await _bounds(d, "stop", good=[longest], bad=[[*longest, "x"], ["x", ""], ["x" * 257]])


@case(
    226,
    "Token ids that end the answer; the token itself is part of token_ids. At most 64; empty:"
    " none.",
)
async def stop_token_ids(d: DecodeHand) -> None:
    """More than 64 stop token ids are refused, 64 are not."""
    await _bounds(d, "stop_token_ids", good=[[*range(64)]], bad=[[*range(65)]])


async def _bounds(d: DecodeHand, field: str, good: list[Any], bad: list[Any]) -> None:
    """Broken unless D grants with each good value, and refuses each bad one naming the field."""
    p = await d.prefill()
    for value in good:
        request = d.request()
        await p.allocate(request, sampling=_sampling(field, value))
        await p.release(request)
    for value in bad:
        call = f"sampling.{field} {value!r}"[:80]
        fault = await p.allocate_refused(
            d.request(), Reason.BAD_REQUEST, call, sampling=_sampling(field, value)
        )
        check_field(fault, field)


def _sampling(field: str, value: Any) -> sampling_pb2.SamplingParams:
    params: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    return sampling_pb2.SamplingParams(**{**params, field: value})
