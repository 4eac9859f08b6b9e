"""Cases that need a full pool: whoever holds it, whoever waits, and what D says of both."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.case import eventually, expect, within
from pd_grpc.conformance.decode.prefill import KitPrefill
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.v1 import decode_pb2, sampling_pb2


def request_of(d: DecodeHand, blocks: int, **fields: Any) -> Request:
    """A request that needs exactly so many blocks, whether D reserves for the prompt alone, for a
    token more or for the whole answer."""
    output = max(1, d.block_size // 2)
    sampling = sampling_pb2.SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    return d.request(max(1, blocks * d.block_size - output), sampling=sampling, **fields)


async def fill(d: DecodeHand, p: KitPrefill, *pieces: int, leave: int = 0) -> list[Request]:
    """Take every block but `leave`: a transfer for each of `pieces`, in blocks, and then as many as
    the rest needs. P's heartbeats keep the grants."""
    longest = max(1, d.subject.room_tokens // d.block_size)
    rest = d.subject.total_blocks - leave - sum(pieces)
    wanted = [*pieces]
    while rest > 0:
        wanted.append(min(rest, longest))
        rest -= wanted[-1]
    held = []
    for blocks in wanted:
        held.append(request_of(d, blocks))
        await p.allocate(held[-1])
    return held


async def free(p: KitPrefill, blocks: int) -> decode_pb2.Load:
    """Wait until so many blocks are free; returns the load that says so. What was given back may
    have to wait for its last writer."""

    def right(load: decode_pb2.Load) -> bool:
        return load.free_blocks == blocks

    return await eventually(p.load_now, right, f"{blocks} blocks free")


async def queued(p: KitPrefill, requests: int) -> decode_pb2.Load:
    """Wait until so many Allocates wait in D; returns the load that says so."""

    def right(load: decode_pb2.Load) -> bool:
        return load.queued_requests == requests

    return await eventually(p.load_now, right, f"{requests} Allocates that wait")


async def wait_in_queue(p: KitPrefill, request: Request, before: int, **fields: Any) -> Any:
    """An Allocate that waits behind `before` others; returns the call."""
    call = p.ask(request, **fields)
    await queued(p, before + 1)
    return call


async def granted(p: KitPrefill, call: Any, what: str) -> decode_pb2.AllocateResponse:
    """The grant of an Allocate that waited; heartbeats keep it from now on."""
    grant: decode_pb2.AllocateResponse = await within(None, call, what)
    p.held.add(grant.grant_id)
    return grant


def expect_waiting(call: Any, what: str) -> None:
    """Broken when an Allocate has been answered."""
    expect(not call.done(), what, "an answer")
