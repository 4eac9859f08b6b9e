"""R1xx: what a client may ask, and how both legs carry it."""

from __future__ import annotations

from pd_grpc.conformance.calls import answer
from pd_grpc.conformance.case import answer_s, expect, expect_equal
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.instance import MODEL
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.v1 import inference_pb2, sampling_pb2

ANSWER = [901, 902, 903]


@case(101, "Prompt plus output may have at most this many tokens.")
async def model_info_is_that_of_the_instances(r: RouterHand) -> None:
    """GetModelInfo gives the limits that the instances behind the router announce."""
    request = inference_pb2.GetModelInfoRequest()
    call = r.inference.GetModelInfo(request, timeout=answer_s())
    info: inference_pb2.GetModelInfoResponse = await answer(call, "GetModelInfo")
    expect_equal(info.max_model_len, MODEL.max_model_len, "max_model_len")
    expect_equal(info.vocab_size, MODEL.vocab_size, "vocab_size")


@case(102, "The KV layout; unset on the router.")
async def model_info_has_no_layout(r: RouterHand) -> None:
    """GetModelInfo has no layout."""
    request = inference_pb2.GetModelInfoRequest()
    call = r.inference.GetModelInfo(request, timeout=answer_s())
    info: inference_pb2.GetModelInfoResponse = await answer(call, "GetModelInfo")
    expect(not info.HasField("layout"), "no layout", info)


@case(103, "At least one, each below the vocabulary's size; packed, up to a million.")
async def token_ids_pass_unchanged(r: RouterHand) -> None:
    """A prompt of token ids reaches both legs as it was sent."""
    prompt = r.prompt(40)
    one = await r.routed(token_ids=inference_pb2.TokenIds(ids=prompt))
    expect_equal(list(one.prefill.request.token_ids), prompt, "token_ids of Prefill")
    expect_equal(list(one.decode.request.token_ids.ids), prompt, "token_ids of Generate")
    await one.finish(ANSWER)


@case(104, "Plain text; no chat template is applied.")
async def text_is_tokenized_alike_for_both(r: RouterHand) -> None:
    """A text becomes the same token ids on both legs, and a longer one begins with them."""
    one = await r.routed(text="The quick brown fox")
    ids = list(one.prefill.request.token_ids)
    expect(bool(ids), "token ids of the text on Prefill", one.prefill.request)
    expect_equal(one.decode.request.WhichOneof("prompt"), "token_ids", "the prompt's kind on D")
    expect_equal(list(one.decode.request.token_ids.ids), ids, "token_ids of Generate, as Prefill's")
    await one.finish(ANSWER)
    other = await r.routed(text="The quick brown fox jumps over the lazy dog")
    longer = list(other.prefill.request.token_ids)
    # The last token of a text may become another one when text follows.
    expect_equal(longer[: len(ids) - 1], ids[:-1], "the beginning of a longer text's token_ids")
    await other.finish(ANSWER)


@case(105, "A conversation, through the model's chat template.")
async def a_conversation_goes_through_the_template(r: RouterHand) -> None:
    """Messages become the same token ids on both legs, which differ from their bare text's and
    with the roles."""
    prompts = []
    for role in ("user", "system"):
        messages = inference_pb2.ChatMessages(
            messages=[
                inference_pb2.ChatMessage(role=role, content="Name a colour."),
                inference_pb2.ChatMessage(role="user", content="Now."),
            ]
        )
        one = await r.routed(messages=messages)
        prompts.append(list(one.prefill.request.token_ids))
        expect(bool(prompts[-1]), "token ids of the messages on Prefill", one.prefill.request)
        seen = list(one.decode.request.token_ids.ids)
        expect_equal(seen, prompts[-1], "token_ids of Generate, as Prefill's")
        await one.finish(ANSWER)
    bare = await r.routed(text="Name a colour.Now.")
    prompts.append(list(bare.prefill.request.token_ids))
    await bare.finish(ANSWER)
    expect(prompts[0] != prompts[1], "other token ids for another role", prompts[0])
    expect(prompts[2] not in prompts[:2], "other token ids than the bare text's", prompts[2])


@case(106, "0 means the router's default (256 unless configured); P and D refuse 0.")
async def max_tokens_is_filled_in(r: RouterHand) -> None:
    """A request without max_tokens has the same number above 0 on both legs."""
    one = await r.routed(sampling=sampling_pb2.SamplingParams(temperature=0))
    filled = one.prefill.request.sampling.max_tokens
    expect(filled > 0, "max_tokens above 0 on Prefill", one.prefill.request.sampling)
    expect_equal(one.decode.request.sampling.max_tokens, filled, "max_tokens, as Prefill's,")
    await one.finish(ANSWER)


@case(107, "0 means the router's default (256 unless configured)")
async def the_default_shrinks_to_fit(r: RouterHand) -> None:
    """A request without max_tokens whose prompt leaves room for five is given no more."""
    room = 5
    prompt = [7] * (r.subject.max_model_len - room)
    one = await r.routed(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(temperature=0),
    )
    filled = one.decode.request.sampling.max_tokens
    expect(0 < filled <= room, f"max_tokens from 1 to {room}", filled)
    await one.finish(ANSWER)


@case(
    108, "Unset: the router mints one where the temperature is not 0, so that a retry answers alike"
)
async def a_seed_is_minted(r: RouterHand) -> None:
    """Sampled requests without a seed get one, the same on both legs and another for each."""
    seeds = []
    for _ in range(2):
        one = await r.routed(sampling=sampling_pb2.SamplingParams(max_tokens=3, temperature=0.7))
        p, d = one.prefill.request.sampling, one.decode.request.sampling
        expect(p.HasField("seed"), "a seed on Prefill", p)
        expect(d.HasField("seed"), "a seed on Generate", d)
        expect_equal(d.seed, p.seed, "the seed of Generate, as Prefill's,")
        seeds.append(p.seed)
        await one.finish(ANSWER)
    expect(seeds[0] != seeds[1], "another seed for another request", seeds)


@case(
    109,
    "Both carry one ref, whose attempt is 1 at first, the same prompt as token ids and the "
    "same sampling.",
)
async def sampling_passes_unchanged(r: RouterHand) -> None:
    """Sampling with every field set, and seeds at their bounds, reaches both legs as it was
    sent."""
    for seed in (0, 2**64 - 1):
        sampling = sampling_pb2.SamplingParams(
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_p=0.25,
            top_k=17,
            seed=seed,
            stop=["never said", "nor this"],
            stop_token_ids=[31, 77],
            ignore_eos=True,
            logprobs=3,
            min_p=0.125,
            presence_penalty=-1.5,
            frequency_penalty=0.5,
            repetition_penalty=1.25,
            logit_bias={7: -100, 31_999: 12.5},
        )
        one = await r.routed(sampling=sampling)
        expect_equal(one.prefill.request.sampling, sampling, "sampling of Prefill")
        expect_equal(one.decode.request.sampling, sampling, "sampling of Generate")
        await one.finish(ANSWER)


@case(
    110,
    "Set by the router on its first message: the request's name, minted where the client "
    "gave none.",
)
async def a_request_id_is_minted(r: RouterHand) -> None:
    """Requests without a name are given one each, on the first message."""
    names = []
    for _ in range(2):
        one = await r.routed()
        await one.finish(ANSWER)
        names.append(one.client.messages[0].request_id)
        expect(bool(names[-1]), "a request_id on the first message", one.client.messages[0])
    expect(names[0] != names[1], "another request_id for another request", names)


@case(111, "The client's name for the request, up to 128 characters, unique in flight.")
async def a_request_id_is_kept(r: RouterHand) -> None:
    """A name of 128 characters is told back on the first message."""
    name = r.name("n").ljust(128, "x")
    one = await r.routed(request_id=name)
    await one.finish(ANSWER)
    expect_equal(one.client.messages[0].request_id, name, "request_id of the first message")


@case(112, "Counts as output and not as prompt, and is never emitted again.")
async def earlier_output_passes_and_is_not_shown_again(r: RouterHand) -> None:
    """Output that the client has already reaches both legs as such, and the answer has neither its
    tokens nor its text again."""
    earlier = [911, 912]
    text = []
    for generated in ([], earlier):
        one = await r.routed(generated_token_ids=generated)
        for leg in (one.prefill, one.decode):
            seen = list(leg.request.generated_token_ids)
            expect_equal(seen, generated, f"generated_token_ids on {leg.instance}")
        expect_equal(list(one.decode.request.token_ids.ids), one.prompt, "token_ids of Generate")
        await one.finish(ANSWER)
        text.append("".join(m.text for m in one.client.messages))
    # A tokenizer may write a space or none where a text begins.
    expect_equal(text[1].strip(), text[0].strip(), "the text of the new tokens alone,")
