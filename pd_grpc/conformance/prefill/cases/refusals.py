"""P7xx: requests that P must not take in. No D is asked for any of them."""

from __future__ import annotations

from collections.abc import Mapping

from pd_grpc.conformance.calls import check_feature
from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.subject import PrefillHand
from pd_grpc.conformance.sampling_values import (
    SAMPLING_OFF,
    SCOPE_OFF,
    all_beyond_bounds,
    beyond_bounds,
    lacking,
    not_of_instances,
    reserved_scopes,
    sampling_with,
)
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import prefill_pb2, sampling_pb2

MAX_NAME = 128


@case(701, "The prompt, at least one token, each below the vocabulary's size;")
async def an_empty_prompt(p: PrefillHand) -> None:
    """A request without a token is refused with a violation of token_ids."""
    await p.refused(p.request(prompt=[]), Reason.BAD_REQUEST, "no prompt", "token_ids")


@case(702, "The prompt, at least one token, each below the vocabulary's size;")
async def a_token_outside_the_vocabulary(p: PrefillHand) -> None:
    """A token id of the vocabulary's size is refused, in the prompt and in the output so far; the
    one below it is taken."""
    size = p.subject.vocab_size
    fault = await p.refused(p.request(prompt=[5, size]), Reason.BAD_REQUEST, "a token too great")
    _names(fault.fields[0].field if fault.fields else "", "token_ids")
    continued = p.request(generated=[size])
    fault = await p.refused(continued, Reason.BAD_REQUEST, "a generated token too great")
    _names(fault.fields[0].field if fault.fields else "", "generated_token_ids")
    d = await p.decode()
    await p.call(p.request(prompt=[5, size - 1]), d).handed_off()


@case(703, "How to sample the first token; max_tokens must be set.")
async def no_max_tokens(p: PrefillHand) -> None:
    """A max_tokens of 0 is refused with a violation of sampling.max_tokens."""
    none = sampling_pb2.SamplingParams(temperature=0)
    await p.refused(
        p.request(sampling=none), Reason.BAD_REQUEST, "no max_tokens", "sampling.max_tokens"
    )


@case(704, "1 to 128 characters of [A-Za-z0-9._:-], unique for ever;")
async def malformed_transfer_ids(p: PrefillHand) -> None:
    """An empty id, one of 129 characters and one with a blank are refused; every character that is
    allowed is taken."""
    for bad in ("", "x" * 129, "a b", "a/b", "ä"):
        await p.refused(
            p.request(transfer_id=bad), Reason.BAD_REQUEST, f"id {bad[:9]!r}", "ref.transfer_id"
        )
    d = await p.decode()
    good = f"AZaz09._:-{p.name('t')}"
    await p.call(p.request(transfer_id=good.ljust(128, "-")), d).handed_off()


@case(705, "Counts from 1; 0 is refused.")
async def attempt_zero(p: PrefillHand) -> None:
    """Attempt 0 is refused with a violation of ref.attempt."""
    await p.refused(p.request(attempt=0), Reason.BAD_REQUEST, "attempt 0", "ref.attempt")


@case(706, "Where to hand over: the first one, then alternates in order. At least one.")
async def no_decode(p: PrefillHand) -> None:
    """A request that names no D is refused with a violation of decodes."""
    await p.refused(p.request(), Reason.BAD_REQUEST, "no D", "decodes", decodes=[])


@case(707, "host:port of its control endpoint, with a port from 1 to 65,535; must be set.")
async def a_bad_endpoint(p: PrefillHand) -> None:
    """An endpoint that is empty, or has no port or one out of bounds, is refused with a violation
    that says which."""
    good = await p.decode()
    for bad in ("", "nowhere", "127.0.0.1:0", "127.0.0.1:99999"):
        targets = [
            prefill_pb2.DecodeTarget(endpoint=good.endpoint),
            prefill_pb2.DecodeTarget(endpoint=bad),
        ]
        await p.refused(
            p.request(),
            Reason.BAD_REQUEST,
            "a bad endpoint",
            "decodes[1].endpoint",
            decodes=targets,
        )


@case(
    708,
    'Reserved. A field or value that says "reserved" is part of the protocol\'s shape. A'
    " request that uses one is refused with UNIMPLEMENTED and reason FEATURE by a server"
    " that was not built for it, and so is one that needs a feature which was not negotiated",
)
async def reserved_sampling_fields(p: PrefillHand) -> None:
    """Each reserved field of sampling is refused by name, and its neutral value is taken."""
    for path, sampling in not_of_instances():
        request = p.request(sampling=sampling)
        check_feature(await p.refused(request, Reason.FEATURE, f"{path} is reserved"), path)
    d = await p.decode()
    neutral = p.request(sampling=sampling_with(**SAMPLING_OFF))
    await p.call(neutral, d).handed_off()


@case(709, "All of it but cache_salt is reserved in v1.")
async def reserved_scope_fields(p: PrefillHand) -> None:
    """Each field of scope is refused by name, and its neutral value is taken."""
    for path, scope in reserved_scopes():
        check_feature(await p.refused(p.request(), Reason.FEATURE, path, scope=scope), path)
    d = await p.decode()
    await p.call(p.request(), d, scope=SCOPE_OFF).handed_off()


@case(710, "Name of the P that is meant; another P refuses with WRONG_INSTANCE.")
async def another_prefill_is_meant(p: PrefillHand) -> None:
    """A request that names another P is refused; one that names this P, as its Hello does, is
    taken."""
    d = await p.decode()
    await p.call(p.request(), d).handed_off()
    name = d.hello.seen[0].instance.name
    other = f"{name}-not"[-MAX_NAME:]
    await p.refused(p.request(), Reason.WRONG_INSTANCE, "another P", prefill_name=other)
    await p.call(p.request(), d, prefill_name=name).handed_off()


@case(711, "the prompt is longer than the model")
async def a_prompt_longer_than_the_model(p: PrefillHand) -> None:
    """A prompt of one token more than the model takes is refused with a violation of token_ids."""
    request = p.request(p.subject.max_model_len + 1)
    await p.refused(request, Reason.BAD_REQUEST, "longer than the model", "token_ids")


@case(712, "Output the client has already, fewer tokens than max_tokens.")
async def as_much_output_as_may_be(p: PrefillHand) -> None:
    """As many generated tokens as max_tokens leave none to generate, and are refused."""
    request = p.request(generated=p.tokens(8))
    await p.refused(request, Reason.BAD_REQUEST, "no token is left", "generated_token_ids")


@case(713, "The client's name for the request, up to 128 characters, for people; never a key.")
async def a_long_request_id(p: PrefillHand) -> None:
    """A request_id of 129 characters is refused with a violation; one of 128 is taken."""
    long = p.request(request_id="r" * 129)
    await p.refused(long, Reason.BAD_REQUEST, "a long request_id", "request_id")
    d = await p.decode()
    await p.call(p.request(request_id="r" * 128), d).handed_off()


@case(
    714,
    "BAD_REQUEST comes with google.rpc.BadRequest, a violation for each field that is"
    " wrong, by its path from the message sent, such as sampling.top_p or"
    " hello.instance.name",
)
async def every_violation_is_named(p: PrefillHand) -> None:
    """Sampling fields out of their bounds, each alone and all at once, are named by their paths."""
    for name, sampling in beyond_bounds(p.subject.info.features):
        request = p.request(sampling=sampling)
        await p.refused(request, Reason.BAD_REQUEST, f"a bad {name}", f"sampling.{name}")
    names, sampling = all_beyond_bounds()
    request = p.request(attempt=0, sampling=sampling)
    fault = await p.refused(request, Reason.BAD_REQUEST, "many at once", "ref.attempt")
    named = {violation.field for violation in fault.fields}
    missing = {f"sampling.{name}" for name in names} - named
    expect(not missing, "a violation for each field that is wrong", f"none for {missing}")


@case(
    715,
    "A request that uses one is refused with UNIMPLEMENTED and reason FEATURE by a server"
    " that was not built for it, and so is one that needs a feature which was not"
    " negotiated; neither is ever ignored.",
)
async def features_that_were_not_negotiated(p: PrefillHand) -> None:
    """A request whose sampling needs a feature goes to no D whose Welcome does not list it: it is
    refused by the field's name, and D is asked for no blocks."""
    d = await p.decode()
    for path, sampling in lacking(()):
        request = p.request(sampling=sampling)
        fault = await p.call(request, d).fails(Reason.FEATURE, f"{path} was not negotiated")
        check_feature(fault, path)
    expect_equal(d.allocate.seen, [], "the Allocates")


@case(
    720,
    "ALREADY_EXISTS with DUPLICATE_TRANSFER while the same ref is in flight, which is unharmed;",
)
async def the_same_ref_twice(p: PrefillHand) -> None:
    """A second Prefill of a ref in flight is refused, and the first one is handed over."""
    d = await p.decode()
    d.kv.end.hold()
    request = p.request()
    first = p.call(request, d)
    await d.kv.end.came("end")
    await p.call(request, d).fails(Reason.DUPLICATE_TRANSFER, "the ref is in flight")
    d.go()
    await first.handed_off()
    expect_equal(len(d.allocate.seen), 1, "the number of Allocates")


@case(
    721, "A greater attempt supersedes a smaller one everywhere, even when it comes from another P"
)
async def a_greater_attempt(p: PrefillHand) -> None:
    """Attempt 2 comes while attempt 1 is in flight: that hears SUPERSEDED with both attempts, its D
    hears Release, and attempt 2 is handed over."""
    d, other = await p.decode(), await p.decode()
    d.kv.end.hold()
    request = p.request()
    first = p.call(request, d)
    await d.kv.end.came("end")
    second = p.call(p.request(transfer_id=request.transfer_id, attempt=2), other)
    fault = await first.fails(Reason.SUPERSEDED, "attempt 2 came")
    _both_attempts(fault.metadata, "1", "2")
    await second.handed_off()
    release = await d.release.came("Release of attempt 1")
    expect_equal(release.ref.attempt, 1, "ref.attempt of Release")


@case(
    722,
    "An attempt smaller than the greatest that is in flight or remembered is refused with"
    " ABORTED, STALE_ATTEMPT.",
)
async def a_smaller_attempt(p: PrefillHand) -> None:
    """Attempt 2 comes after attempt 3, while that is in flight and after its end: it is refused,
    and hears both attempts."""
    d = await p.decode()
    d.kv.end.hold()
    request = p.request(attempt=3)
    newest = p.call(request, d)
    await d.kv.end.came("end")
    older, other = p.request(transfer_id=request.transfer_id, attempt=2), await p.decode()
    fault = await p.call(older, other).fails(Reason.STALE_ATTEMPT, "attempt 3 is in flight")
    _both_attempts(fault.metadata, "2", "3")
    d.go()
    await newest.handed_off()
    fault = await p.call(older, other).fails(Reason.STALE_ATTEMPT, "attempt 3 is remembered")
    _both_attempts(fault.metadata, "2", "3")
    expect_equal(other.hello.seen, [], "the sessions with the D that it named")


@case(
    723,
    "ABORTED with RELEASED when it has ended here and is remembered, with STALE_ATTEMPT or"
    " SUPERSEDED when a greater attempt is known or comes",
)
async def a_ref_that_has_ended(p: PrefillHand) -> None:
    """A ref that was handed over, and one that failed, are refused when they come again; the next
    attempt is taken."""
    d = await p.decode()
    done, failed = p.request(), p.request()
    await p.call(done, d).handed_off()
    await p.call(failed, p.closed_endpoint()).fails(Reason.DECODE_LOST, "nobody listens")
    for request in (done, failed):
        await p.call(request, d).fails(Reason.RELEASED, "the ref has ended here")
    expect_equal(len(d.allocate.seen), 1, "the number of Allocates")
    await p.call(p.request(transfer_id=failed.transfer_id, attempt=2), d).handed_off()


def _names(field: str, wanted: str) -> None:
    expect(field.startswith(wanted), f"a violation of {wanted}", field)


def _both_attempts(metadata: Mapping[str, str], attempt: str, newest: str) -> None:
    expect_equal(dict(metadata), {"attempt": attempt, "newest": newest}, "the metadata")
