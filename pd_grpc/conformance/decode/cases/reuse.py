"""D28x: what D has kept of a prompt before. A D without a prefix cache wants all every time."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import check_fault
from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.decode.cases.mismatch import BOTH
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.prefill import KitPrefill, wanted_blocks
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.faults import Code, Reason
from pd_grpc.v1 import decode_pb2, sampling_pb2

HELD = "what is missing here D holds already, and keeps until the transfer ends."


@case(280, HELD)
async def a_prompt_that_begins_like_one_before(d: DecodeHand) -> None:
    """Three blocks are handed over and answered. Then come prompts that have nothing of them, one
    block, all but a token, all, and more: D wants what lies behind cached_tokens, whole blocks of
    what both begin with at most, and every answer is right."""
    d.needs_blocks(5)
    p, size = await d.prefill(), d.block_size
    first = d.request(3 * size)
    await _answered(d, p, first)
    other = d.request(2 * size).prompt
    for prompt, alike in (
        (other, 0),
        (first.prompt[:size] + other, 1),
        (first.prompt[:-1], 2),
        (first.prompt, 3),
        (first.prompt + other[:1], 3),
    ):
        grant = await _answered(d, p, d.request(prompt=list(prompt)))
        whole = set(range(-(-len(prompt) // size)))
        cached = whole - set(wanted_blocks(grant.wanted))
        expect_equal(cached, set(range(len(cached))), "the blocks not wanted, from the first on")
        expect(len(cached) <= alike, f"at most {alike} blocks that are not wanted", len(cached))
        expect_equal(grant.cached_tokens, len(cached) * size, "cached_tokens")


@case(281, "Of Generate the block_hashes are those that its tokens have;")
async def hashes_of_another_prompt(d: DecodeHand) -> None:
    """P names the blocks of a prompt that D has seen; the client's is another. Whichever leg comes
    first, a D that makes use of the names refuses both, and no token is shown; one that wants every
    block all the same answers rightly."""
    d.needs_blocks(4)
    p, size = await d.prefill(), d.block_size
    seen = d.request(2 * size)
    await _answered(d, p, seen)
    again = d.request(prompt=list(seen.prompt))
    uses = bool((await _answered(d, p, again)).cached_tokens)
    for client_first in (True, False):
        request, names = d.request(2 * size), _named(d, seen)
        leg = d.generate(request) if client_first else None
        await d.arrived()
        if uses and client_first:
            fault = await p.allocate_refused(
                request, Reason.HANDOFF_MISMATCH, "the blocks' names differ", **names
            )
            expect_equal(fault.metadata.get("part"), "block_hashes", "the part")
        else:
            grant = await p.allocate(request, **names)
        leg = leg or d.generate(request)
        if not uses:
            await HandOver(d, p, request, grant, leg).completes()
            continue
        fault = check_fault(
            await leg.outcome(), Reason.HANDOFF_MISMATCH, "the names differ", Code.INTERNAL
        )
        expect_equal(fault.metadata.get("part"), "block_hashes", "the part")
        expect(not leg.tokens, "no token", leg.tokens)


@case(
    282,
    "whole blocks alone, and only of which every layer was verified there, or computed by D"
    " itself.",
)
async def a_transfer_that_broke_off(d: DecodeHand) -> None:
    """All chunks of a prompt but the last one come. The next of the same prompt wants every block,
    while the first one is there (asked where D has six blocks) and after P has given it back; the
    answer of the last one is right."""
    d.needs_blocks(3)
    p = await d.prefill()
    request = d.request(2 * d.block_size)
    leg = d.generate(request)
    h = HandOver(d, p, request, await p.allocate(request, **_named(d, request)), leg)
    transfer = await h.receiving()
    await transfer.send_all(h.kv()[:-1])
    if d.subject.total_blocks >= 6:
        beside = d.request(prompt=list(request.prompt))
        other = d.generate(beside)
        grant = await p.allocate(beside, **_named(d, beside))
        expect_equal(sorted(wanted_blocks(grant.wanted)), [0, 1], "the blocks wanted meanwhile")
        await p.release(beside)
        await other.outcome()
    await p.release(request)
    await leg.outcome()
    again = d.request(prompt=list(request.prompt))
    grant = await _answered(d, p, again)
    expect_equal(sorted(wanted_blocks(grant.wanted)), [0, 1], "the blocks wanted")


@case(283, "KV computed under one salt is never used under another.")
async def another_salt(d: DecodeHand) -> None:
    """The same prompt under a salt, under another and under none: D wants every block."""
    d.needs_blocks(3)
    p = await d.prefill()
    prompt = d.request(2 * d.block_size).prompt
    for salt in (b"kit-a", b"kit-b", b""):
        grant = await _answered(d, p, d.request(prompt=list(prompt)), salt)
        expect_equal(sorted(wanted_blocks(grant.wanted)), [0, 1], f"the blocks wanted, {salt!r}")


@case(
    284,
    "Chain hashes of the prompt's whole blocks, generated_token_ids included, from the first one on"
    " and no more than there are;",
)
async def names_of_no_use(d: DecodeHand) -> None:
    """More names than whole blocks, and a name of 15 bytes."""
    p = await d.prefill()
    request = d.request(2 * d.block_size)
    for hashes in ([b"h" * 16] * 3, [b"h" * 15]):
        await p.allocate_refused(
            request,
            Reason.BAD_REQUEST,
            f"{[len(each) for each in hashes]} bytes",
            block_hashes=[decode_pb2.BlockHash(hash=each) for each in hashes],
        )


@case(285, BOTH)
async def legs_of_two_salts(d: DecodeHand) -> None:
    """P's leg has another salt than the client's, and no block is named."""
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request, **_salted(b"kit-a"))
    await d.arrived()
    await p.allocate_refused(
        request, Reason.HANDOFF_MISMATCH, "the salts differ", **_salted(b"kit-b")
    )
    check_fault(await leg.outcome(), Reason.HANDOFF_MISMATCH, "the salts differ", Code.INTERNAL)


def _salted(salt: bytes) -> dict[str, Any]:
    return {"scope": sampling_pb2.RequestScope(cache_salt=salt)} if salt else {}


def _named(d: DecodeHand, request: Request, salt: bytes = b"") -> dict[str, Any]:
    """The fields of an Allocate that names the blocks of a request."""
    size = d.block_size
    names = BlockChain(size, salt).names(request.tokens, len(request.tokens) // size)
    return {"block_hashes": [decode_pb2.BlockHash(hash=name) for name in names], **_salted(salt)}


async def _answered(
    d: DecodeHand, p: KitPrefill, request: Request, salt: bytes = b""
) -> decode_pb2.AllocateResponse:
    """A request that names its blocks and is sent what D wants, to the end of its answer."""
    leg = d.generate(request, **_salted(salt))
    grant = await p.allocate(request, **_named(d, request, salt))
    await HandOver(d, p, request, grant, leg).completes()
    return grant
