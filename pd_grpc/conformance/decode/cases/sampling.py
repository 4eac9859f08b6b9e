"""D22x: the bounds of sampling, as Allocate has them."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import check_field
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.sampling_values import BOUNDS, sampling_with
from pd_grpc.protocol.faults import Reason


@case(220, "0 means the router's default (256 unless configured); P and D refuse 0.")
async def max_tokens(d: DecodeHand) -> None:
    """Values of max_tokens below 1 are refused, 1 is not."""
    await _bounds(d, "max_tokens", 0)


@case(
    221,
    "End-of-sequence, stop ids and stop strings do not end the answer before this many tokens;"
    " 0 to max_tokens.",
)
async def min_tokens(d: DecodeHand) -> None:
    """Values of min_tokens below 0 and above max_tokens are refused, both limits are not."""
    await _bounds(d, "min_tokens")


@case(222, "Flattens (above 1) or sharpens (below 1) the distribution; 0 to 100.")
async def temperature(d: DecodeHand) -> None:
    """A temperature below 0, above 100 or that is no number is refused, 0 and 100 are not."""
    await _bounds(d, "temperature")


@case(
    223,
    "Nucleus sampling: the smallest set of likeliest tokens whose probabilities reach this;"
    " above 0 and at most 1.",
)
async def top_p(d: DecodeHand) -> None:
    """Values of top_p up to 0, above 1 and no number are refused, a little and 1 are not."""
    await _bounds(d, "top_p")


@case(224, "Only the k likeliest tokens; 0 is off, below 0 is refused.")
async def top_k(d: DecodeHand) -> None:
    """Values of top_k below 0 are refused, 0 and the greatest are not."""
    await _bounds(d, "top_k")


@case(
    225,
    "At most 16, each 1 to 256 characters; empty: none.",
)
async def stop(d: DecodeHand) -> None:
    """Too many stop strings, an empty one and a long one are refused, the limits are not."""
    await _bounds(d, "stop")


@case(
    226,
    "Token ids that end the answer; the token itself is part of token_ids. At most 64; empty:"
    " none.",
)
async def stop_token_ids(d: DecodeHand) -> None:
    """More than 64 stop token ids are refused, 64 are not."""
    await _bounds(d, "stop_token_ids")


async def _bounds(d: DecodeHand, field: str, *more_beyond: Any) -> None:
    """Broken unless D grants with each value within the field's bounds, and refuses each one beyond
    them naming the field."""
    p = await d.prefill()
    for value in BOUNDS[field].within:
        request = d.request()
        await p.allocate(request, sampling=sampling_with(**{field: value}))
        await p.release(request)
    for value in (*BOUNDS[field].beyond, *more_beyond):
        call, sampling = f"sampling.{field} {value!r}"[:80], sampling_with(**{field: value})
        fault = await p.allocate_refused(d.request(), Reason.BAD_REQUEST, call, sampling=sampling)
        check_field(fault, field)
