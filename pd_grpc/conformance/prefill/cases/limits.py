"""P8xx: fields and values of a later version, and messages at their size limits."""

from __future__ import annotations

from pd_grpc.conformance.calls import check_feature
from pd_grpc.conformance.case import NotApplicable, expect, expect_equal
from pd_grpc.conformance.later import UNKNOWN_VALUE, later, with_unknown
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.grant import expect_kv
from pd_grpc.conformance.prefill.subject import MAX_NEW_TOKENS, PrefillHand
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import layout_pb2, sampling_pb2

A_MILLION = 1_000_000


@case(801, "A server ignores fields that it does not know;")
async def unknown_fields_of_the_caller(p: PrefillHand) -> None:
    """A request with fields of a later version, in it and in all within, is handed over."""
    d = await p.decode()
    request = p.request()
    await p.call_with(later(request.prefill(d.endpoint))).handed_off()
    p.check_first_token(request, d)


@case(
    802,
    "A later version therefore adds only fields that may be ignored, or a name in"
    " Hello.features for those that may not.",
)
async def unknown_fields_of_d(p: PrefillHand) -> None:
    """A D whose every answer has fields of a later version gets the request all the same."""
    d = await p.decode()
    d.is_later = True
    request = p.request()
    await p.call(request, d).handed_off()
    expect_kv(await d.granted(request.ref), p.rule, request.tokens)


@case(
    803,
    "with FEATURE where the value names a way to do the thing (kind of a layout's group or"
    " plane, transport of a Transfer, direction), with BAD_REQUEST elsewhere.",
)
async def an_unknown_direction(p: PrefillHand) -> None:
    """A direction of a later version is refused by name."""
    scope = with_unknown(sampling_pb2.RequestScope(), "direction")
    fault = await p.refused(p.request(), Reason.FEATURE, "an unknown direction", scope=scope)
    check_feature(fault, "scope.direction")


@case(804, "The transport chosen, one of Hello's.")
async def a_transport_that_was_not_offered(p: PrefillHand) -> None:
    """D chooses a transport that Hello did not offer, or one of a later version: P has nothing to
    do with it, and the caller hears LAYOUT_MISMATCH."""
    for transport in (layout_pb2.TRANSPORT_NIXL, UNKNOWN_VALUE):
        d = await p.decode()
        d.hello.answer["transport"] = transport
        caller = p.call(p.request(), d)
        if transport in (await d.hello.came("Hello")).transports:
            continue
        await caller.fails(Reason.LAYOUT_MISMATCH, "a transport that was not offered")
        expect_equal(d.allocate.seen, [], "the Allocates")


@case(808, "The transport chosen, one of Hello's. Unspecified means INLINE.")
async def a_transport_that_is_not_named(p: PrefillHand) -> None:
    """D names no transport, neither in Welcome nor with the grant: P sends KV inline."""
    d = await p.decode()
    d.hello.answer["transport"] = layout_pb2.TRANSPORT_UNSPECIFIED
    d.allocate.answer["transport"] = layout_pb2.TRANSPORT_UNSPECIFIED
    request = p.request()
    await p.call(request, d).handed_off()
    expect_kv(await d.granted(request.ref), p.rule, request.tokens)


@case(805, "packed, up to a million.")
async def a_million_tokens(p: PrefillHand) -> None:
    """A prompt of a million tokens is taken in, or refused for the model's or the pool's size, and
    not by the transport."""
    d = await p.decode()
    d.hello.hold()
    caller = p.call(p.request(prompt=p.tokens(1) * A_MILLION), d)
    event = await caller.stream.next("queued or a refusal")
    if event is not None:
        expect(event.HasField("queued"), "queued as the first event", event)
        return
    ended = await caller.ends()
    sizes = (Reason.BAD_REQUEST, Reason.TOO_LARGE)
    refused = isinstance(ended, Fault) and ended.reason in sizes
    expect(refused, "queued, or a refusal with BAD_REQUEST or TOO_LARGE", str(ended))


@case(806, "INVALID_ARGUMENT with BAD_REQUEST or TOO_LARGE for what P could never compute;")
async def a_prompt_larger_than_the_pool(p: PrefillHand) -> None:
    """A prompt of one block more than P has is refused with needed and total; one that fills the
    pool is handed over."""
    pool, longest = p.total_blocks * p.block_size, p.subject.max_model_len - MAX_NEW_TOKENS
    if pool >= longest:
        raise NotApplicable(f"a prompt of {longest} tokens, the longest, fits into P's pool")
    fault = await p.refused(p.request(pool + 1), Reason.TOO_LARGE, "it could never be computed")
    expect({"needed", "total"} <= fault.metadata.keys(), "needed and total", fault.metadata)
    d = await p.decode()
    whole = p.request(pool)
    await p.call(whole, d).handed_off()
    expect_kv(await d.granted(whole.ref), p.rule, whole.tokens)


@case(
    807,
    "Longest prompt plus output in tokens that D takes. 0 means that only D can tell.",
)
async def longer_than_d_takes(p: PrefillHand) -> None:
    """Welcome says how long a prompt with its output may be: one that is just so long is handed
    over, one with a token more fails with TOO_LARGE, whether P says so or D, which goes by what
    Allocate asks for."""
    d = await p.decode()
    request = p.request()
    d.hello.answer["max_model_len"] = len(request.prompt) + request.sampling.max_tokens
    await p.call(request, d).handed_off()
    longer = p.request(len(request.prompt) + 1)
    await p.call(longer, d).fails(Reason.TOO_LARGE, "longer than D takes")
