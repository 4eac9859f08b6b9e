"""P20x: what P asks of D for a request."""

from __future__ import annotations

from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.subject import PrefillHand
from pd_grpc.conformance.sampling_values import SAMPLING_OFF
from pd_grpc.protocol.faults import Fault, Quota, Reason
from pd_grpc.protocol.messages import prompt_digest, seconds
from pd_grpc.v1 import sampling_pb2


@case(201, "Tokens whose KV P will send: prompt and generated_token_ids; at least 1.")
async def prompt_tokens_count_both(p: PrefillHand) -> None:
    """An answer that is continued is asked for with prompt and output so far counted together."""
    d = await p.decode()
    request = p.request(generated=p.tokens(3))
    await p.call(request, d).handed_off()
    asked = d.allocate.seen[0]
    expect_equal(asked.prompt_tokens, len(request.prompt) + 3, "prompt_tokens")


@case(202, "Tokens that may still be generated, the first included; at least 1.")
async def max_new_tokens_counts_what_is_left(p: PrefillHand) -> None:
    """Of max_tokens 8 with three tokens of output so far five are left."""
    d = await p.decode()
    await p.call(p.request(generated=p.tokens(3)), d).handed_off()
    expect_equal(d.allocate.seen[0].max_new_tokens, 5, "max_new_tokens")


@case(
    203,
    "SHA-256 over the tokens as little-endian uint32 (prompt, then generated), then adapter"
    " id and media hashes where there are any",
)
async def the_digest_is_of_both(p: PrefillHand) -> None:
    """The digest is of the prompt, and of prompt and output so far where there is any."""
    d = await p.decode()
    for request in (p.request(), p.request(generated=p.tokens(2))):
        await p.call(request, d).handed_off()
        expect_equal(
            d.allocate.seen[-1].prompt_digest, prompt_digest(request.tokens), "prompt_digest"
        )


@case(204, "The request's sampling, compared with the client leg's with defaults filled in;")
async def sampling_passes_unchanged(p: PrefillHand) -> None:
    """Every field of the caller's sampling reaches D as it was."""
    d = await p.decode()
    sampling = sampling_pb2.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=2**64 - 1,
        stop=["never so", "nor so"],
        stop_token_ids=[3, 5],
        ignore_eos=True,
    )
    await p.call(p.request(sampling=sampling), d).handed_off()
    got = d.allocate.seen[0].sampling
    for field, value in sampling.ListFields():
        expect_equal(getattr(got, field.name), value, f"sampling.{field.name}")
    asked = {field.name for field, _ in sampling.ListFields()}
    for field, value in got.ListFields():
        off = field.name in asked or SAMPLING_OFF.get(field.name) == value
        expect(off, f"no sampling.{field.name}, which was not asked for", value)


@case(205, "The client's deadline is the request's budget and only shrinks.")
async def the_budget_shrinks(p: PrefillHand) -> None:
    """D hears of no more time than the caller gave, and the next D of no more than the first."""
    first, second = await p.decode(), await p.decode()
    first.allocate.refuse(Fault(Reason.NO_BLOCKS, "none", retry_after_s=0.1, quota=Quota(3, 0)))
    limit = 20.0
    await p.call(p.request(), first, second, timeout_s=limit).handed_off()
    budgets = [seconds(d.allocate.seen[0].budget) for d in (first, second)]
    expect(0 < budgets[0] <= limit, f"a budget of at most {limit:g} s", budgets)
    expect(0 < budgets[1] <= budgets[0], "a budget for the second D that is not greater", budgets)


@case(
    206,
    "False when the first token is sure to end the answer, for example with max_tokens 1:",
)
async def one_token_needs_no_kv(p: PrefillHand) -> None:
    """With one token left to generate P needs no KV on D, opens no Transfer, and hands over."""
    d = await p.decode()
    one = sampling_pb2.SamplingParams(max_tokens=1, temperature=0)
    four = sampling_pb2.SamplingParams(max_tokens=4, temperature=0)
    for request in (p.request(sampling=one), p.request(sampling=four, generated=p.tokens(3))):
        await p.call(request, d).handed_off()
        expect_equal(d.allocate.seen[-1].kv_needed, False, "kv_needed")
    expect_equal(d.kv.open.seen, [], "the Transfers")
    await p.call(p.request(), d).handed_off()
    expect_equal(d.allocate.seen[-1].kv_needed, True, "kv_needed, with more tokens to come,")


@case(207, "The client's name for the request, up to 128 characters, for people; never a key.")
async def request_ids_are_no_key(p: PrefillHand) -> None:
    """Two requests at once of one request_id are both handed over, and D hears the name."""
    d = await p.decode()
    named = [p.request(request_id="the same") for _ in range(2)]
    callers = [p.call(request, d) for request in named]
    for caller in callers:
        await caller.handed_off()
    names = [asked.request_id for asked in d.allocate.seen]
    expect_equal(names, ["the same"] * 2, "the request ids")
